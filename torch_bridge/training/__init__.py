"""What holds while a sim is trained: modes, steps, schedules, BatchNorm."""
