"""What users say: parameter groups, options and blocks of matrices."""
