"""Where problems come from: data, prompts, graders and rewards."""
