"""What cases of single functions and of whole loops share: recording them, predicting them, showing differences."""
