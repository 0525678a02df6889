"""A Student-t: its natural gradients, and the step rule that fits its shape."""
