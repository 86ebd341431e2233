"""What a T5 is: seeded random models of published sizes, narrow and rescaled ones, its rules, and what a step reads."""
