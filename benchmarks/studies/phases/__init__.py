"""Does lost data cost less once the early phase of a training is over?"""
