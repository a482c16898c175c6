"""What a person asks for: one file a verb. (A file of this name beside the package's names would hide the function.)"""
