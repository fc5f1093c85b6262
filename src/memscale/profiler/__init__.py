"""What a model needs: its blocks, and what each costs in memory and time."""
