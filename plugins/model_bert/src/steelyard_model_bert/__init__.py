"""BERT, RoBERTa and XLM-RoBERTa encoders for steelyard."""
