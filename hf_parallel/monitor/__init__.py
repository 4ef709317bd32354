"""What training does with its time and memory: measured, compared over ranks and with the plan, and written down."""
