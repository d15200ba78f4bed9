"""What a person runs by hand: `pfeife <command>`. The only part that prints."""
