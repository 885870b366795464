//! Softmax and layer norm, which a training pass records in parts.
//!
//! Burn's autodiff composes both of small operations. The graph keeps these, as whoever looks at it or
//! computes gradients of its own expects; an execution may compute them as one.
//!
//! Burn's softmax and its relatives subtract a maximum that they detach, which a recording does not show:
//! see `maxima`.

mod maxima;

use burn::backend::ir::{
    ActivationOperationIr, FloatOperationIr, ModuleOperationIr, NumericOperationIr, OperationIr,
    ScalarIr, TensorId, TensorIr,
};
use rustc_hash::{FxHashMap as HashMap, FxHashSet as HashSet};

use super::Graph;

/// Operations that together are one.
#[derive(Debug, Clone)]
pub(crate) struct Composite {
    pub(crate) kind: CompositeKind,
    /// Positions of all but the last one; nothing else reads their results.
    pub(crate) inner: Vec<usize>,
    /// The result.
    pub(crate) out: TensorIr,
}

/// What they are.
#[derive(Debug, Clone)]
pub(crate) enum CompositeKind {
    /// A softmax.
    Softmax { x: TensorIr, axis: usize },
    /// A normalization over the last dimension; scale and shift have as many elements as it, whatever
    /// their rank.
    LayerNorm {
        x: TensorIr,
        gamma: TensorIr,
        beta: Option<TensorIr>,
        epsilon: ScalarIr,
    },
}

impl CompositeKind {
    /// What it is called where it is recorded as one operation.
    pub(crate) fn name(&self) -> &'static str {
        match self {
            Self::Softmax { .. } => "softmax",
            Self::LayerNorm { .. } => "layer_norm",
        }
    }

    /// What it reads.
    pub(crate) fn operands(&self) -> Vec<&TensorIr> {
        match self {
            Self::Softmax { x, .. } => vec![x],
            Self::LayerNorm { x, gamma, beta, .. } => [Some(x), Some(gamma), beta.as_ref()]
                .into_iter()
                .flatten()
                .collect(),
        }
    }
}

/// The composites of a graph.
#[derive(Debug, Clone, Default)]
pub(crate) struct Composites {
    /// By the position of the last operation.
    ends: HashMap<usize, Composite>,
    /// For each other position the last one.
    inner: HashMap<usize, usize>,
    /// Positions of maxima that have no gradient.
    maxima: HashSet<usize>,
}

impl Composites {
    /// The composite that ends at a position.
    pub(crate) fn ending_at(&self, index: usize) -> Option<&Composite> {
        self.ends.get(&index)
    }

    /// The composite that a position is in, but not the end of.
    pub(crate) fn around(&self, index: usize) -> Option<(usize, &Composite)> {
        let end = *self.inner.get(&index)?;
        Some((end, self.ends.get(&end)?))
    }

    /// Whether a position is a maximum that a softmax, or what is like one, subtracts: no gradient goes
    /// through it.
    pub(crate) fn is_subtracted_maximum(&self, index: usize) -> bool {
        self.maxima.contains(&index)
    }

    pub(super) fn of(graph: &Graph) -> Self {
        let finder = Finder {
            graph,
            made_by: graph
                .operations
                .iter()
                .enumerate()
                .flat_map(|(index, operation)| operation.outputs().map(move |out| (out.id, index)))
                .collect(),
        };
        let mut found = Self::default();
        // From behind: a shift belongs to its norm, which without it ends before.
        for index in (0..graph.operations.len()).rev() {
            found.maxima.extend(finder.subtracted_maximum(index));
            if found.inner.contains_key(&index) {
                continue;
            }
            if let Some(composite) = finder.softmax(index).or_else(|| finder.layer_norm(index)) {
                found
                    .inner
                    .extend(composite.inner.iter().map(|one| (*one, index)));
                found.ends.insert(index, composite);
            }
        }
        found
    }
}

struct Finder<'a> {
    graph: &'a Graph,
    made_by: HashMap<TensorId, usize>,
}

impl<'a> Finder<'a> {
    /// The operation that makes a tensor which nothing but `readers` operands reads, and its position.
    fn maker(&self, tensor: &TensorIr, readers: usize) -> Option<(&'a OperationIr, usize)> {
        let index = *self.made_by.get(&tensor.id)?;
        let read = self.graph.readers.get(&tensor.id).map_or(0, Vec::len);
        let is_result = self.graph.results.contains(&tensor.id);
        let operation = &self.graph.operations[index];
        let is_own =
            self.graph.hook_of(operation).is_none() && self.graph.noted_cast(operation).is_none();
        (read == readers && !is_result && is_own).then_some((operation, index))
    }

    fn numeric(
        &self,
        tensor: &TensorIr,
        readers: usize,
    ) -> Option<(&'a NumericOperationIr, usize)> {
        match self.maker(tensor, readers)? {
            (OperationIr::NumericFloat(_, operation), index) => Some((operation, index)),
            _ => None,
        }
    }

    fn own(&self, index: usize) -> Option<&'a OperationIr> {
        let operation = &self.graph.operations[index];
        self.graph.hook_of(operation).is_none().then_some(operation)
    }

    /// `exp(x − max x) / Σ exp(x − max x)`, or one operation.
    fn softmax(&self, index: usize) -> Option<Composite> {
        let (exp, sum, out) = match self.own(index)? {
            OperationIr::Activation(ActivationOperationIr::Softmax(softmax)) => {
                let (x, axis) = (softmax.input.clone(), softmax.axis);
                return Some(Composite {
                    kind: CompositeKind::Softmax { x, axis },
                    inner: Vec::new(),
                    out: softmax.out.clone(),
                });
            }
            OperationIr::NumericFloat(_, NumericOperationIr::Div(div)) => {
                (&div.lhs, &div.rhs, &div.out)
            }
            _ => return None,
        };
        let (NumericOperationIr::SumDim(sum), at_sum) = self.numeric(sum, 1)? else {
            return None;
        };
        let (exponent, at_exp) = self.exp(exp, 2)?;
        let (NumericOperationIr::Sub(shift), at_shift) = self.numeric(exponent, 1)? else {
            return None;
        };
        let (NumericOperationIr::MaxDim(most), at_most) = self.numeric(&shift.rhs, 1)? else {
            return None;
        };
        let fits = sum.input.id == exp.id && most.input.id == shift.lhs.id && most.axis == sum.axis;
        fits.then(|| Composite {
            kind: CompositeKind::Softmax {
                x: shift.lhs.clone(),
                axis: sum.axis,
            },
            inner: vec![at_most, at_shift, at_exp, at_sum],
            out: out.clone(),
        })
    }

    /// `(x − mean x) / √(var x + ε) ∘ γ + β` over the last dimension, or one operation.
    fn layer_norm(&self, index: usize) -> Option<Composite> {
        if let OperationIr::Module(ModuleOperationIr::LayerNorm(norm)) = self.own(index)? {
            return Some(Composite {
                kind: CompositeKind::LayerNorm {
                    x: norm.input.clone(),
                    gamma: norm.gamma.clone(),
                    beta: norm.beta.clone(),
                    epsilon: norm.epsilon,
                },
                inner: Vec::new(),
                out: norm.out.clone(),
            });
        }
        let OperationIr::NumericFloat(_, operation) = self.own(index)? else {
            return None;
        };
        match operation {
            NumericOperationIr::Add(add) if is_row(&add.rhs, &add.out) => {
                let (NumericOperationIr::Mul(scale), at_scale) = self.numeric(&add.lhs, 1)? else {
                    return None;
                };
                let (x, epsilon, mut inner) = self.normalized(&scale.lhs)?;
                inner.push(at_scale);
                let fits = is_row(&scale.rhs, &scale.out) && x.shape == add.out.shape;
                fits.then(|| Composite {
                    kind: CompositeKind::LayerNorm {
                        x,
                        gamma: scale.rhs.clone(),
                        beta: Some(add.rhs.clone()),
                        epsilon,
                    },
                    inner,
                    out: add.out.clone(),
                })
            }
            NumericOperationIr::Mul(scale) if is_row(&scale.rhs, &scale.out) => {
                let (x, epsilon, inner) = self.normalized(&scale.lhs)?;
                // Not where a norm over one number is broadcast to the scale.
                (x.shape == scale.out.shape).then(|| Composite {
                    kind: CompositeKind::LayerNorm {
                        x,
                        gamma: scale.rhs.clone(),
                        beta: None,
                        epsilon,
                    },
                    inner,
                    out: scale.out.clone(),
                })
            }
            _ => None,
        }
    }

    /// Of `(x − mean x) / √(var x + ε)` the operand, ε and the positions.
    fn normalized(&self, tensor: &TensorIr) -> Option<(TensorIr, ScalarIr, Vec<usize>)> {
        use NumericOperationIr as Op;
        let (Op::Div(div), at_div) = self.numeric(tensor, 1)? else {
            return None;
        };
        let (OperationIr::Float(_, FloatOperationIr::Sqrt(root)), at_root) =
            self.maker(&div.rhs, 1)?
        else {
            return None;
        };
        let (Op::AddScalar(shift), at_shift) = self.numeric(&root.input, 1)? else {
            return None;
        };
        let (Op::MeanDim(variance), at_variance) = self.numeric(&shift.lhs, 1)? else {
            return None;
        };
        let (Op::Mul(square), at_square) = self.numeric(&variance.input, 1)? else {
            return None;
        };
        // Read by the quotient, and twice by the square.
        let (Op::Sub(centered), at_centered) = self.numeric(&div.lhs, 3)? else {
            return None;
        };
        let (Op::MeanDim(mean), at_mean) = self.numeric(&centered.rhs, 1)? else {
            return None;
        };
        let last = centered.lhs.shape.num_dims().checked_sub(1)?;
        let fits = square.lhs.id == div.lhs.id
            && square.rhs.id == div.lhs.id
            && mean.input.id == centered.lhs.id
            && mean.axis == last
            && variance.axis == last;
        let inner = vec![
            at_mean,
            at_centered,
            at_square,
            at_variance,
            at_shift,
            at_root,
            at_div,
        ];
        fits.then(|| (centered.lhs.clone(), shift.rhs, inner))
    }
}

/// Whether a tensor has one element for each of the last dimension of another one.
fn is_row(tensor: &TensorIr, of: &TensorIr) -> bool {
    let (shape, of) = (tensor.shape.to_vec(), of.shape.to_vec());
    shape.last() == of.last() && shape.iter().rev().skip(1).all(|size| *size == 1)
}
