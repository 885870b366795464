//! Places in a model that are the same in each of its recordings.
//!
//! A tensor is no place: a recurrence unrolls into many tensors of one place, and the next
//! recording names them anew. A [`Site`] is a parameter and a role, the same in every recording of
//! a model.

use std::fmt;

use serde::{Deserialize, Serialize};

/// What a tensor is to an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Role {
    /// A weight, as a product reads it.
    Weight,
    /// What is multiplied with the weight.
    Input,
    /// The product with the weight, with its bias.
    Output,
    /// Queries of an attention, where something is between them and the output of a layer: a
    /// rotation, say. Queries, keys and values that are the output of a layer are its
    /// [`Output`](Self::Output).
    Query,
    /// Keys of an attention, as [`Query`](Self::Query).
    Key,
    /// Values of an attention, as [`Query`](Self::Query).
    Value,
    /// The softmax of an attention's scores, before its dropout.
    Probabilities,
    /// The first operand of another product of two computed tensors.
    Left,
    /// The second operand of another product of two computed tensors.
    Right,
    /// The first operand of a sum of two branches, as in a residual connection. One of them may be
    /// an input of the model, of the same shape; not a mask that is added to an attention's scores.
    SumLeft,
    /// The second operand of a sum of two branches.
    SumRight,
    /// The first operand of a difference of two branches.
    DifferenceLeft,
    /// The second operand of a difference of two branches.
    DifferenceRight,
    /// The first operand of an element-wise product of two branches: a gate, a squeeze-and-excite
    /// block, an outer product. Not of a tensor and what was computed from it without a layer, as in
    /// a normalization.
    FactorLeft,
    /// The second operand of an element-wise product of two branches.
    FactorRight,
    /// The parts of a concatenation: integer arithmetic needs one scale for all of them.
    Concatenation,
}

impl Role {
    /// Its name in paths and tables: `input`, `query`, `sum_left`…
    pub fn name(self) -> &'static str {
        match self {
            Self::Weight => "weight",
            Self::Input => "input",
            Self::Output => "output",
            Self::Query => "query",
            Self::Key => "key",
            Self::Value => "value",
            Self::Probabilities => "probabilities",
            Self::Left => "left",
            Self::Right => "right",
            Self::SumLeft => "sum_left",
            Self::SumRight => "sum_right",
            Self::DifferenceLeft => "difference_left",
            Self::DifferenceRight => "difference_right",
            Self::FactorLeft => "factor_left",
            Self::FactorRight => "factor_right",
            Self::Concatenation => "concatenation",
        }
    }
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A place in a model, the same in each of its recordings and however often it runs in one of them.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Site {
    /// Path of the weight of the layer; of an operation without a weight, that of the layer that
    /// ran last of those before it.
    pub path: String,
    /// What the tensor is there.
    pub role: Role,
    /// Which of the operations without a weight after that layer, from 0. Of a layer 0; the
    /// [`Output`](Role::Output) of a weight that is a table and a matrix, 1 in the second of these roles.
    pub ordinal: usize,
}

impl Site {
    /// The site of a layer.
    pub fn new(path: impl Into<String>, role: Role) -> Self {
        Self {
            path: path.into(),
            role,
            ordinal: 0,
        }
    }
}

impl fmt::Display for Site {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let layer = self.path.strip_suffix(".weight").unwrap_or(&self.path);
        write!(f, "{} of `{layer}`", self.role)?;
        match self.ordinal {
            0 => Ok(()),
            ordinal => write!(f, " ({ordinal})"),
        }
    }
}

/// A [`Hook`](crate::hooks::Hook) of the recorded model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HookInfo {
    /// Path of the module that offered it, for example `fc1.weight.quant.input`.
    pub path: String,
    /// Where it acts, unless it only acts when it is called.
    pub site: Option<Site>,
    /// Its name.
    pub name: &'static str,
    /// Whether it also acts on the zeros that a recurrence starts from.
    pub takes_zeros: bool,
    /// Whether parts of a tensor go through one by one.
    pub takes_parts: bool,
    /// Whether the forward pass calls it by itself; where it does not, it acts at its site.
    pub is_called: bool,
}
