"""What runs in each rank while a plan is executed; knows schedules, not planning."""
