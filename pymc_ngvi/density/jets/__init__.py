"""Forward differentiation: values with their first and second derivatives, carried along a graph at many points.

For recursions in few dimensions. PyTensor differentiates backwards: the graph of a Hessian product of a recursion has
tens of times the nodes of log p, and building it takes longer than the fit.
"""
