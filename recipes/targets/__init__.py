"""Where a recipe runs: one module per platform, each a pure function from a recipe to text."""
