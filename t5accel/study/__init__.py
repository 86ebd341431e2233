"""Two models besides T5, as the posts that the course answers took them: a BERT that answers questions, and GPT-2."""
