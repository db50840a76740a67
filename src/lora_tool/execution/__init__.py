"""The only code that computes and writes weights: it turns a plan into a folder."""
