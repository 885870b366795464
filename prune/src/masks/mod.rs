//! The masks of a whole model, as data.

pub(crate) mod attach;
pub(crate) mod magnitude;
pub(crate) mod mask;
pub(crate) mod rewind;

pub use attach::AttachMasks;
pub use mask::Mask;
pub use rewind::rewind;

use std::collections::HashSet;

use serde::{Deserialize, Serialize};

use crate::host::bits;
use crate::{Layout, PruneError};

/// Which weights of one parameter are kept.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ParameterMask {
    path: String,
    shape: Vec<usize>,
    kept: Vec<bool>,
}

impl ParameterMask {
    /// The mask of the parameter at `path`; one flag per weight, row-major, `true` = kept.
    ///
    /// # Errors
    ///
    /// [`PruneError::Mismatch`] if there are not as many flags as `shape` has elements.
    pub fn new(
        path: impl Into<String>,
        shape: impl Into<Vec<usize>>,
        kept: Vec<bool>,
    ) -> Result<Self, PruneError> {
        let shape = shape.into();
        // A product that overflows is no number of flags either.
        let expected = shape
            .iter()
            .try_fold(1usize, |product, size| product.checked_mul(*size))
            .unwrap_or(usize::MAX);
        if kept.len() != expected {
            return Err(PruneError::Mismatch {
                what: "flags of a mask",
                expected,
                found: kept.len(),
            });
        }
        Ok(Self {
            path: path.into(),
            shape,
            kept,
        })
    }

    /// Path of the parameter, for example `fc1.weight`.
    pub fn path(&self) -> &str {
        &self.path
    }

    /// Shape of the parameter.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// One flag per weight, row-major, `true` = kept.
    pub fn kept(&self) -> &[bool] {
        &self.kept
    }

    /// Number of weights kept.
    pub fn nonzeros(&self) -> usize {
        self.kept.iter().filter(|kept| **kept).count()
    }

    /// Fraction of weights pruned, 0 to 1; 0 for a parameter without weights.
    pub fn sparsity(&self) -> f64 {
        sparsity(self.nonzeros(), self.kept.len())
    }
}

/// The masks of a model: for each masked parameter which of its weights are kept.
///
/// Plain data, on the host. It comes from a solution ([`from_support`](Self::from_support)), from
/// the sizes of weights ([`by_magnitude`](Self::by_magnitude)), from the zeros of a pruned model
/// ([`from_zeros`](Self::from_zeros)) or from a model that carries masks ([`of`](Self::of)); it goes onto a model with [`attach`](Self::attach), or with
/// [`replace`](Self::replace) if masks are there already. Serializes to one bit per weight,
/// packed into bytes: in JSON, a list of these, some four bits.
///
/// ```
/// use burn_lean_prune::{Layout, LayerKind, Masks};
///
/// let mut layout = Layout::new();
/// layout.push("fc1.weight", [4, 2], LayerKind::Linear, 2.0);
/// layout.push("fc2.weight", [2, 1], LayerKind::Linear, 2.0);
/// let masks = Masks::from_support(&layout, &[0, 5, 9])?;
/// assert_eq!(masks.get("fc1.weight").unwrap().sparsity(), 6.0 / 8.0);
/// assert_eq!(masks.get("fc2.weight").unwrap().kept(), [false, true]);
/// assert_eq!(masks.sparsity(), 7.0 / 10.0);
/// # Ok::<(), burn_lean_prune::PruneError>(())
/// ```
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "Vec<PackedMask>", into = "Vec<PackedMask>")]
pub struct Masks {
    parameters: Vec<ParameterMask>,
}

impl Masks {
    /// The masks of several parameters.
    ///
    /// # Errors
    ///
    /// [`PruneError::DuplicateMask`] if two of them have one path.
    pub fn new(parameters: Vec<ParameterMask>) -> Result<Self, PruneError> {
        let mut paths = HashSet::new();
        if let Some(twice) = parameters.iter().find(|mask| !paths.insert(&mask.path)) {
            return Err(PruneError::DuplicateMask {
                path: twice.path.clone(),
            });
        }
        Ok(Self { parameters })
    }

    /// Masks that keep every weight of the layout: what a model carries from the start where more than
    /// masks is to act on its weights, see [`GradualConfig`](crate::GradualConfig).
    ///
    /// ```
    /// use burn::nn::LinearConfig;
    /// use burn::tensor::Device;
    /// use burn_lean_prune::{Masks, Selection};
    ///
    /// let linear = LinearConfig::new(3, 2).init(&Device::flex());
    /// let masks = Masks::keeping_all(Selection::of(&linear, None)?.layout());
    /// assert_eq!((masks.weights(), masks.nonzeros()), (6, 6));
    /// # Ok::<(), burn_lean_prune::PruneError>(())
    /// ```
    pub fn keeping_all(layout: &Layout) -> Self {
        let parameters = layout.layers().iter().map(|layer| ParameterMask {
            path: layer.path.clone(),
            shape: layer.shape.clone(),
            kept: vec![true; layer.len()],
        });
        Self {
            parameters: parameters.collect(),
        }
    }

    /// Masks that keep the weights of `support`, indices of the flat vector in any order.
    ///
    /// # Errors
    ///
    /// [`PruneError::SupportIndex`] for an index beyond the layout,
    /// [`PruneError::DuplicateMask`] for a layout that names a parameter twice.
    pub fn from_support(layout: &Layout, support: &[usize]) -> Result<Self, PruneError> {
        let mut kept = vec![false; layout.len()];
        for index in support {
            match kept.get_mut(*index) {
                Some(kept) => *kept = true,
                None => {
                    return Err(PruneError::SupportIndex {
                        index: *index,
                        parameters: layout.len(),
                    });
                }
            }
        }
        let masks = layout.layers().iter().map(|layer| {
            ParameterMask::new(&layer.path, &*layer.shape, kept[layer.range()].to_vec())
        });
        Self::new(masks.collect::<Result<_, _>>()?)
    }

    /// The mask of each parameter, in the model's order.
    pub fn parameters(&self) -> &[ParameterMask] {
        &self.parameters
    }

    /// The mask of the parameter at `path`.
    pub fn get(&self, path: &str) -> Option<&ParameterMask> {
        self.parameters.iter().find(|mask| mask.path == path)
    }

    /// Whether each weight is kept, one mask after the other.
    pub(crate) fn flags(&self) -> impl Iterator<Item = bool> {
        self.parameters.iter().flat_map(|mask| &mask.kept).copied()
    }

    /// Whether no parameter is masked.
    pub fn is_empty(&self) -> bool {
        self.parameters.is_empty()
    }

    /// Number of masked weights, kept or not.
    pub fn weights(&self) -> usize {
        self.parameters.iter().map(|mask| mask.kept.len()).sum()
    }

    /// Number of weights kept.
    pub fn nonzeros(&self) -> usize {
        self.parameters.iter().map(ParameterMask::nonzeros).sum()
    }

    /// Fraction of the masked parameters' weights that is pruned, 0 to 1; 0 without any.
    pub fn sparsity(&self) -> f64 {
        sparsity(self.nonzeros(), self.weights())
    }
}

fn sparsity(nonzeros: usize, weights: usize) -> f64 {
    match weights {
        0 => 0.0,
        _ => (weights - nonzeros) as f64 / weights as f64,
    }
}

#[derive(Serialize, Deserialize)]
struct PackedMask {
    path: String,
    shape: Vec<usize>,
    kept: Vec<u8>,
}

impl From<Masks> for Vec<PackedMask> {
    fn from(masks: Masks) -> Self {
        let packed = |mask: ParameterMask| PackedMask {
            path: mask.path,
            shape: mask.shape,
            kept: bits::pack(mask.kept),
        };
        masks.parameters.into_iter().map(packed).collect()
    }
}

impl TryFrom<Vec<PackedMask>> for Masks {
    type Error = PruneError;

    fn try_from(packed: Vec<PackedMask>) -> Result<Self, PruneError> {
        let masks = packed.into_iter().map(|mask| {
            let count = mask
                .shape
                .iter()
                .try_fold(1usize, |product, size| product.checked_mul(*size));
            let kept = count
                .and_then(|count| bits::unpack(&mask.kept, count))
                .ok_or_else(|| PruneError::Record {
                    what: format!("the mask of `{}`", mask.path),
                    reason: format!(
                        "{} bytes are not one bit for each element of {:?}",
                        mask.kept.len(),
                        mask.shape
                    ),
                })?;
            ParameterMask::new(mask.path, mask.shape, kept)
        });
        Self::new(masks.collect::<Result<_, _>>()?)
    }
}
