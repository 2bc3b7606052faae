"""Whole trainings, whole models, and first calls."""
