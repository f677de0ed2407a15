"""What a recipe needs and costs: memory, disk, time, dollars. Pure arithmetic, no framework."""
