"""What a trained model is worth: evaluation, few-shot, nearest neighbours, linear probe, prediction."""
