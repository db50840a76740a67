"""What a merge takes from the base model beside its weights."""
