{
  description = "Flake for optimizer kernels";

  # The commit stands in flake.lock too, with its hash; a new one needs `nix flake update`.
  inputs.kernel-builder.url = "github:huggingface/kernels/8ac69fc542a4306eade0759ef7c45b4f2ae57df0";

  outputs =
    { self, kernel-builder }:
    kernel-builder.lib.genKernelFlakeOutputs {
      inherit self;
      path = ./.;
      pythonCheckInputs =
        ps: with ps; [
          hypothesis
          safetensors
        ];
    };
}
