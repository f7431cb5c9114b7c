"""What a module computes: found by running it on crafted inputs and comparing with a family of formulas."""
