"""Sparse dependences: sets of coordinates, their colouring, and Hessians from as few products as they allow."""
