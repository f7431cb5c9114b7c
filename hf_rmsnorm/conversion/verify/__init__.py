"""Before a result is published, it runs side by side with its source, and gets its
model card.
"""
