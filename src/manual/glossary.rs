//! Words.
//!
//! | word | means |
//! |---|---|
//! | *back-solve* | the values of the weights that are kept, from the linear system of the problem with all others at zero: the best values for that support, where magnitude pruning leaves the old ones |
//! | *base, effective value* | what a parameter stores and the optimizer moves; what it is worth in the forward pass |
//! | *codes, grid* | the integers of quantized numbers; the values they can stand for |
//! | *convert* | fake-quantized weights become codes, with the trained scales, to the bit |
//! | *dead columns* | weights with no gradient in any sample: the Fisher says nothing of them. A solver keeps to the given objective; the pruner may remove them first ([`DeadColumns`](crate::prune::DeadColumns)) |
//! | *empirical Fisher* | GᵀG/n of the gradients of single losses, in the place of the Hessian |
//! | *fake quantize* | to the grid and back, in float, with a straight-through gradient |
//! | *loss scale* | the factor on an F16 loss that keeps small gradients; found by trying |
//! | *mask* | true where a weight is kept |
//! | *master weights* | the FP32 parameters that the optimizer moves |
//! | *N:M* | at most N nonzeros in every M consecutive weights |
//! | *observer* | collects the range of what passes by |
//! | *prepare* | attach quantizers, or casts |
//! | *recording* | the operations of a forward pass, without numbers |
//! | *region* | where an autocast that is not recorded casts weights and inputs |
//! | *ridge* | the weight of ½‖w − w₀‖² in the problem: how far the quadratic is believed |
//! | *role, site* | what a tensor is to an operation (input, query, branch of a sum), and where: a weight's path and a role |
//! | *sparsity* | the fraction of zeros |
//! | *support* | the indices of the weights that are kept |
//! | *tempering* | rows of G divided by a power of their norm, so that a few examples with large gradients do not decide alone; exponent 0 leaves them, 1 makes all equally long ([`Problem::with_tempering`](crate::prune::Problem::with_tempering)) |
