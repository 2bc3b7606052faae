"""Parts of the demo: config, corpus, model, package, training, checkpoints, report, sweep."""
