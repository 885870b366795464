//! Masks that keep the largest weights.

use burn::module::Module;

use crate::problem::feasible::Feasible;
use crate::{Budget, Layout, Masks, PruneError, Selection, SparsityPattern};

impl Masks {
    /// Masks that keep the largest weights that `pattern` and `budget` allow; of groups those with
    /// the largest sum of absolute values. It looks at no data: what every method is compared with.
    ///
    /// ```
    /// use burn::module::Param;
    /// use burn::nn::LinearConfig;
    /// use burn::tensor::Device;
    /// use burn_lean_prune::{Budget, Masks, Selection, SparsityPattern};
    ///
    /// let device = Device::flex();
    /// let mut linear = LinearConfig::new(2, 2).init(&device);
    /// linear.weight = Param::from_data([[0.5, -3.0], [0.1, 2.0]], &device);
    /// let selection = Selection::of(&linear, None)?;
    /// let (pattern, budget) = (SparsityPattern::Unstructured, Budget::Sparsity(0.5));
    /// let masks = Masks::by_magnitude(&linear, &selection, &pattern, &budget)?;
    /// assert_eq!(masks.get("weight").unwrap().kept(), [false, true, false, true]);
    /// let linear = masks.attach(linear)?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// Prunes in one step and leaves running statistics of BatchNorm as they are:
    /// [`recompute_batch_norm`](crate::recompute_batch_norm) afterwards.
    ///
    /// # Errors
    ///
    /// - [`PruneError::OtherModel`] where `model` is not the one that was selected from,
    ///   [`PruneError::NonFiniteWeight`].
    /// - What is wrong with the pattern or the budget, as [`solve`](crate::solve) says it.
    pub fn by_magnitude<M: Module>(
        model: &M,
        selection: &Selection,
        pattern: &SparsityPattern,
        budget: &Budget,
    ) -> Result<Self, PruneError> {
        let weights = selection.finite_weights(model)?;
        let support = largest(&weights, pattern, budget, selection.layout())?;
        Self::from_support(selection.layout(), &support)
    }
}

/// Indices of the largest weights, ascending.
pub(crate) fn largest(
    weights: &[f32],
    pattern: &SparsityPattern,
    budget: &Budget,
    layout: &Layout,
) -> Result<Vec<usize>, PruneError> {
    let feasible = Feasible::new(pattern, budget, layout)?;
    if let Some(largest) = feasible.largest(weights) {
        return Ok(largest);
    }
    let all: Vec<usize> = (0..weights.len()).collect();
    let sizes: Vec<f64> = weights.iter().map(|w| f64::from(w.abs())).collect();
    feasible.select(&all, &sizes, 1.0)
}
