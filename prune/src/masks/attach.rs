//! Masks onto a model, and back from it.

use std::collections::HashMap;

use burn::module::{Module, Param, ParamGroup, ParamId, Reparameterizer};
use burn::tensor::{Bool, DType, Int, Tensor};
use burn_lean_reparam::{
    FloatVisitor, PathMapper, Rejected, Trail, attach_if_any, each_plain_float, map_with_path,
    visit_plain_floats,
};

use crate::masks::mask::{zero_base, zeros_and_ones};
use crate::model::carried::{Bearer, attached_masks};
use crate::{Mask, Masks, PruneError, masks::ParameterMask};

impl Masks {
    /// Masks that keep what is not zero in the parameters of `group`: how the masks of a pruned
    /// checkpoint are recovered.
    ///
    /// Vectors (biases, gains of norms, running statistics) are left out, because zeros are
    /// nothing unusual there. A weight of another rank that was never pruned gets a mask that
    /// keeps all of it. Looks at the stored base: what masks a model carries says
    /// [`of`](Self::of). One read from the device for each parameter.
    ///
    /// ```
    /// use burn::module::{Param, ParamGroup};
    /// use burn::nn::LinearConfig;
    /// use burn::tensor::Device;
    /// use burn_lean_prune::Masks;
    ///
    /// let device = Device::flex();
    /// let mut linear = LinearConfig::new(2, 2).init(&device);
    /// linear.weight = Param::from_data([[0.5, 0.0], [-0.0, 2.0]], &device);
    /// let masks = Masks::from_zeros(&linear, &ParamGroup::all())?;
    /// assert_eq!(masks.get("weight").unwrap().kept(), [true, false, false, true]);
    /// assert_eq!(masks.parameters().len(), 1);
    /// # Ok::<(), burn_lean_prune::PruneError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`PruneError::NoPrunableParameter`] if `group` has no parameter with a rank above 1,
    /// [`PruneError::Device`] if reading failed.
    pub fn from_zeros<M: Module>(model: &M, group: &ParamGroup) -> Result<Self, PruneError> {
        let mut zeros = Zeros {
            group,
            masks: Ok(Vec::new()),
        };
        visit_plain_floats(model, &mut zeros);
        let masks = Self::new(zeros.masks?)?;
        match masks.is_empty() {
            true => Err(PruneError::NoPrunableParameter),
            false => Ok(masks),
        }
    }

    /// The masks that `model` carries, alone or in a [`Chain`](burn_lean_reparam::Chain); none if
    /// it carries none. One read from the device for each parameter.
    ///
    /// # Errors
    ///
    /// [`PruneError::Device`] if reading failed.
    pub fn of<M: Module>(model: &M) -> Result<Self, PruneError> {
        let masks = attached_masks(model).into_iter().map(|mask| {
            let kept = mask.kept.try_into_data().map_err(device)?;
            let kept = kept.iter::<bool>().collect();
            ParameterMask::new(mask.path, mask.shape, kept)
        });
        Self::new(masks.collect::<Result<_, _>>()?)
    }

    /// Attaches the masks: from now on pruned weights are zero, whatever an optimizer does.
    ///
    /// The base of a pruned weight becomes zero, too, so that weight decay and a checkpoint of
    /// the bare parameters see the pruned model. Parameters keep their identity, so that an
    /// optimizer goes on with the state that it has; parameters without a mask are untouched.
    ///
    /// Momentum that an optimizer has already gathered for a weight that is pruned now is not
    /// cleared: it dies away in the base, behind the mask, because the gradient there is zero. An optimizer
    /// that mixes the gradients of a matrix (Muon) moves bases behind masks, too; they stay zero in the
    /// forward pass, and `materialize` folds the mask in.
    ///
    /// # Errors
    ///
    /// The model comes back in the error.
    /// - [`PruneError::MaskOfAnotherModel`]: a parameter does not exist or has another shape.
    /// - [`PruneError::Attach`]: a parameter already carries a reparameterization. For masks
    ///   there is [`replace`](Self::replace), for another meaning on the same weight a
    ///   [`ChainReparameterizer`](burn_lean_reparam::ChainReparameterizer) with
    ///   [`reparameterizer`](Self::reparameterizer).
    pub fn attach<M: Module>(&self, model: M) -> Result<M, Rejected<M, PruneError>> {
        let reparameterizer = match self.reparameterizer(&model) {
            Ok(reparameterizer) => reparameterizer,
            Err(error) => return Err(Rejected::new(model, error)),
        };
        attach_if_any(model, reparameterizer)
            .map_err(|rejected| rejected.map_error(PruneError::from))
    }

    /// What attaches these masks to this very `model`, to be chained with other meanings.
    ///
    /// Masks come first: mask, then fake quantization, then the cast of autocast. For example
    /// `autocast_config.prepare_with(model, masks.reparameterizer(&model)?)`.
    ///
    /// # Errors
    ///
    /// [`PruneError::MaskOfAnotherModel`] if a parameter does not exist or has another shape.
    pub fn reparameterizer<M: Module>(&self, model: &M) -> Result<AttachMasks, PruneError> {
        let mut parameters = HashMap::new();
        each_plain_float(model, |at, float| {
            parameters.insert(at.path(), (float.id(), float.shape()));
        });
        let masks = self.parameters().iter().map(|mask| {
            let found = parameters.get(mask.path());
            match found {
                Some((id, shape)) if shape == mask.shape() => Ok((*id, mask.kept().to_vec())),
                _ => Err(PruneError::MaskOfAnotherModel {
                    path: mask.path().into(),
                    mask: mask.shape().into(),
                    model: found.map(|(_, shape)| shape.clone()),
                }),
            }
        });
        Ok(AttachMasks {
            masks: masks.collect::<Result<_, _>>()?,
        })
    }

    /// Puts these masks in the place of those that `model` carries: gradual pruning goes on
    /// pruning.
    ///
    /// Works inside of a [`Chain`](burn_lean_reparam::Chain), keeps the identity of parameters
    /// and masks and everything else on the weight; tied copies get the same mask. The base becomes
    /// zero wherever the old or the new mask prunes, so that a weight which returns starts from zero.
    /// What an optimizer has gathered for it in the past is still in its state: make a new optimizer
    /// when weights return. Masked parameters that are not among these masks keep theirs.
    ///
    /// # Errors
    ///
    /// The model comes back in the error.
    /// - [`PruneError::NotMasked`]: a parameter carries no mask; [`attach`](Self::attach) first.
    /// - [`PruneError::MaskOfAnotherModel`]: a parameter does not exist or has another shape.
    pub fn replace<M: Module>(&self, model: M) -> Result<M, Rejected<M, PruneError>> {
        if let Err(error) = self.reparameterizer(&model) {
            return Err(Rejected::new(model, error));
        }
        let old: HashMap<_, _> = attached_masks(&model)
            .into_iter()
            .map(|mask| (mask.path, (mask.id, mask.kept)))
            .collect();
        let mut new = HashMap::new();
        for mask in self.parameters() {
            match old.get(mask.path()) {
                Some((id, old)) => {
                    let kept = zeros_and_ones(mask.kept(), &old.device());
                    let both = old.clone().bool_and(kept.clone().not_equal_elem(0));
                    new.insert(*id, NewMask { kept, both });
                }
                None => {
                    let path = mask.path().into();
                    return Err(Rejected::new(model, PruneError::NotMasked { path }));
                }
            }
        }
        let mut replace = Replace {
            bearer: Bearer::default(),
            new,
        };
        Ok(map_with_path(model, &mut replace))
    }

    /// The first parameter that does not carry its mask, but none or another one. One read from the device for
    /// each parameter.
    pub(crate) fn lost_in<M: Module>(&self, model: &M) -> Result<Option<String>, PruneError> {
        let carried = Self::of(model)?;
        let mut masks = self.parameters().iter();
        let lost = masks.find(|mask| carried.get(mask.path()) != Some(*mask));
        Ok(lost.map(|mask| mask.path().into()))
    }
}

/// Attaches masks to the parameters of the model that it was made for.
#[derive(Debug, Clone)]
pub struct AttachMasks {
    masks: HashMap<ParamId, Vec<bool>>,
}

impl Reparameterizer for AttachMasks {
    type Reparam = Mask;

    fn reparameterize<const D: usize>(
        &mut self,
        _path: &str,
        param: Param<Tensor<D>>,
    ) -> (Param<Tensor<D>>, Option<Mask>) {
        let Some(kept) = self.masks.get(&param.id) else {
            return (param, None);
        };
        let mask = Mask::new(kept, &param.lazy_device());
        (zero_base(param, mask.kept()), Some(mask))
    }
}

struct NewMask {
    kept: Tensor<1, Int>,
    /// Kept by the old mask and by the new one.
    both: Tensor<1, Bool>,
}

struct Replace {
    bearer: Bearer,
    new: HashMap<ParamId, NewMask>,
}

impl PathMapper for Replace {
    fn float<const D: usize>(&mut self, at: &Trail, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        if self.bearer.at_parameter(at, param.id)
            && let Some(mask) = self.new.get(&param.id)
        {
            return zero_base(param, mask.both.clone());
        }
        param
    }

    fn int<const D: usize>(
        &mut self,
        at: &Trail,
        param: Param<Tensor<D, Int>>,
    ) -> Param<Tensor<D, Int>> {
        if let Some(mask) = self.bearer.masked(at).and_then(|id| self.new.get(&id)) {
            return param.map(|old| mask.kept.clone().reshape(old.shape()));
        }
        param
    }
}

struct Zeros<'a> {
    group: &'a ParamGroup,
    masks: Result<Vec<ParameterMask>, PruneError>,
}

impl FloatVisitor for Zeros<'_> {
    fn visit<const D: usize>(&mut self, path: &str, param: &Param<Tensor<D>>) {
        let Ok(masks) = &mut self.masks else { return };
        if D < 2 || !self.group.matches(&param.id, Some(path)) {
            return;
        }
        let base = param.base();
        if matches!(base.dtype(), DType::QFloat(_)) {
            return;
        }
        let shape = base.shape().to_vec();
        let mask = base.try_into_data().map_err(device).and_then(|data| {
            let kept = data.iter::<f32>().map(|value| value != 0.0).collect();
            ParameterMask::new(path, shape, kept)
        });
        match mask {
            Ok(mask) => masks.push(mask),
            Err(error) => self.masks = Err(error),
        }
    }
}

fn device(error: impl std::fmt::Display) -> PruneError {
    PruneError::Device {
        reason: error.to_string(),
    }
}
