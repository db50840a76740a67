"""The only code that computes and writes weights: it carries out a plan, into a folder."""
