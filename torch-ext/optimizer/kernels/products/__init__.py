"""The matrix products of an orthogonalization, and what prepares their operands."""
