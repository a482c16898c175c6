"""Export of a trained model to another runtime, compared with the model itself."""
