//! The parameters that a pattern fits.

use burn::module::{Module, ParamGroup};

use crate::{
    PruneError, Selection, SparsityPattern,
    model::{ExcludedBecause, Layer},
};

impl Selection {
    /// [`of`](Self::of) for a pattern: where `group` leaves the choice to the default, parameters that
    /// an N:M pattern does not divide are excluded, with the reason. Those that a group names are
    /// not: the solver refuses them.
    ///
    /// ```
    /// use burn::nn::conv::Conv2dConfig;
    /// use burn::tensor::Device;
    /// use burn_lean_prune::{Selection, SparsityPattern};
    ///
    /// let device = Device::flex();
    /// let kernels = [3, 8].map(|channels| Conv2dConfig::new([channels, 8], [3, 3]).init(&device));
    /// let selection = Selection::for_pattern(
    ///     &kernels.to_vec(),
    ///     None,
    ///     &SparsityPattern::NM { n: 2, m: 4 },
    /// )?;
    /// assert_eq!(selection.layout().len(), 8 * 8 * 9);
    /// let reason = selection.parameters()[0].excluded.as_ref().unwrap().to_string();
    /// assert_eq!(reason, "2:4 does not divide the 3 of axis 1");
    /// # Ok::<(), burn_lean_prune::PruneError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// As [`of`](Self::of), and [`PruneError::PatternDoesNotDivide`] where nothing is left.
    pub fn for_pattern<M: Module>(
        model: &M,
        group: Option<&ParamGroup>,
        pattern: &SparsityPattern,
    ) -> Result<Self, PruneError> {
        let mut selection = Self::of(model, group)?;
        let SparsityPattern::NM { m, .. } = pattern else {
            return Ok(selection);
        };
        let indivisible = |layer: &Layer| {
            let axis = layer.reduction_axis()?;
            let length = layer.shape[axis];
            (*m > 0 && !length.is_multiple_of(*m)).then_some((axis, length))
        };
        if group.is_some()
            || selection
                .layout
                .layers()
                .iter()
                .all(|l| indivisible(l).is_some())
        {
            // What is wrong with the pattern is told by its blocks.
            pattern.blocks(&selection.layout)?;
            return Ok(selection);
        }
        let layout = std::mem::take(&mut selection.layout);
        let ids = std::mem::take(&mut selection.ids);
        for (layer, id) in layout.layers().iter().zip(ids) {
            let Some((axis, length)) = indivisible(layer) else {
                let (path, shape) = (layer.path.clone(), layer.shape.clone());
                let layout = &mut selection.layout;
                layout.push(path, shape, layer.kind, layer.flops_per_weight);
                selection.ids.push(id);
                continue;
            };
            let mut parameters = selection.parameters.iter_mut();
            if let Some(parameter) = parameters.find(|parameter| parameter.path == layer.path) {
                parameter.excluded = Some(ExcludedBecause::PatternDoesNotDivide {
                    pattern: pattern.to_string(),
                    axis,
                    length,
                });
            }
        }
        Ok(selection)
    }
}
