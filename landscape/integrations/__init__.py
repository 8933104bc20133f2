"""Callbacks for other trainers, a module for each: Lightning, and Hugging Face's Trainer.

The trainer's package is imported with the module, ``landscape.integrations.lightning`` or
``landscape.integrations.huggingface``, and nowhere else.
"""
