"""Numbers by rows: predictors as sparse matrices, quadrature, expectations and Hessians; no PyTensor."""
