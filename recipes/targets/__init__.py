"""Where a recipe runs: one module per engine, each a pure function from a recipe to text."""
