//! Gradual pruning: stages of pruning with training between them.

use burn::config::Config;
use burn::module::Module;
use burn::tensor::Tensor;
use burn_lean_reparam::{Attached, Rejected, attached};

use crate::model::checks;
use crate::run::training::{Rates, StageTraining};
use crate::{
    Batch, Masks, PruneError, Pruned, PrunerConfig,
    run::{Epoch, StageReport},
};

/// How a model is pruned gradually: prune, train with the zeros held, prune further.
///
/// ```text
/// for stage t of the pruner:
///     prune to the target of t, with fresh gradients     (PrunerConfig)
///     attach the masks
///     for epoch of the stage: model = train(model, epoch)  learning rate: cosine, restarted
///     fold the masks in
/// ```
///
/// # With mixed precision or quantization
///
/// What else acts on the weights (a cast, fake quantization) has state, and comes after the mask. So
/// the model carries masks from the start, in a chain with the rest: [`Masks::keeping_all`], whose
/// [`reparameterizer`](Masks::reparameterizer) goes into `AutocastConfig::prepare_with`, or first into
/// a [`ChainReparameterizer`](burn_lean_reparam::ChainReparameterizer). Each stage then replaces the
/// masks and leaves the rest alone, and so does the end: nothing is folded in.
///
/// ```
/// # use burn::nn::LinearConfig;
/// # use burn::tensor::{Device, Tensor};
/// # use burn_lean_prune::{Budget, FisherConfig, GradualConfig, PrunerConfig, SolverConfig};
/// use burn_lean_prune::{Masks, Selection};
/// use burn_lean_reparam::attach;
///
/// # let device = Device::flex();
/// # let solver = SolverConfig::new(Budget::Sparsity(0.75));
/// # let gradual = GradualConfig::new(PrunerConfig::new(solver, FisherConfig::new(4)), 1, 1);
/// let model = LinearConfig::new(8, 4).init(&device.clone().autodiff());
/// let masks = Masks::keeping_all(Selection::of(&model, None)?.layout());
/// let first = masks.reparameterizer(&model)?;
/// // With quantizers: `ChainReparameterizer::new(first, QatConfig::new().reparameterizer(&model)?)`.
/// let model = attach(model, first)?;
/// let pruned = gradual.prune(
///     model,
///     |model, x: &Tensor<2>| model.forward(x.clone()).square().mean(),
///     |_seed| [Tensor::<2>::ones([6, 8], &device)],
///     |model, _epoch| Ok(model),
/// )?;
/// assert_eq!(Masks::of(&pruned.model)?.sparsity(), 0.75);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// The gradients of the stages are those at the masked and quantized weights, in F32 unless `loss`
/// enters a region.
///
/// After the gradual experiments of [Fast as CHITA, Benbaki et al.,
/// 2023](https://arxiv.org/abs/2302.14623), where a polynomial schedule from 0.5 has 7 stages with
/// 12 epochs each and 28 after the last.
///
/// ```
/// use burn::nn::LinearConfig;
/// use burn::tensor::{Device, Tensor};
/// use burn_lean_prune::{Budget, FisherConfig, GradualConfig, PrunerConfig, SparsitySchedule, SolverConfig};
///
/// let device = Device::flex();
/// let solver = SolverConfig::new(Budget::Sparsity(0.75));
/// let pruner = PrunerConfig::new(solver, FisherConfig::new(4))
///     .with_stages(2)
///     .with_schedule(SparsitySchedule::Linear { base: 0.5 });
/// let mut epochs = Vec::new();
/// let pruned = GradualConfig::new(pruner, 1, 2).prune(
///     LinearConfig::new(8, 4).init(&device.clone().autodiff()),
///     |model, x: &Tensor<2>| model.forward(x.clone()).square().mean(),
///     |_seed| [Tensor::<2>::ones([6, 8], &device)],
///     |model, epoch| {
///         epochs.push((epoch.stage, epoch.epoch, epoch.restart));
///         Ok(model) // train here, with `epoch.learning_rate(…)`
///     },
/// )?;
/// assert_eq!(epochs, [(0, 0, true), (1, 0, true), (1, 1, false)]);
/// assert_eq!(pruned.masks.sparsity(), 0.75);
/// # Ok::<(), burn_lean_prune::PruneError>(())
/// ```
#[derive(Config, Debug)]
pub struct GradualConfig {
    /// What happens at each stage, and how many there are. Its [`state`](PrunerConfig::state)
    /// keeps a stage when it is pruned *and* trained.
    pub pruner: PrunerConfig,
    /// Epochs of training after every stage but the last.
    pub epochs: usize,
    /// Epochs of training after the last stage.
    pub last_epochs: usize,
    /// Learning rate at the start of each stage's training. Default 0.1.
    #[config(default = 0.1)]
    pub learning_rate: f64,
    /// Learning rate at the end of it. Default 1e-5.
    #[config(default = 1e-5)]
    pub last_learning_rate: f64,
}

impl GradualConfig {
    /// Prunes `model` in stages and trains it after each of them.
    ///
    /// `train` runs one epoch and returns the model; its weights carry masks, so whatever the
    /// optimizer does, pruned weights stay zero. In the model that comes back the masks are folded
    /// in, as [`PrunerConfig::prune`] leaves it; where it came with masks, it goes with those of the
    /// last stage. A model that carries something else without masks on what is pruned is refused: it
    /// would be folded in with them.
    ///
    /// # Errors
    ///
    /// The model comes back in the error, as [`PrunerConfig::prune_with`] says; where `train` fails,
    /// it is the one that `train` returns, with masks.
    /// - [`PruneError::InvalidConfig`]: a learning rate that is not positive and finite; a
    ///   [grid](crate::SolverConfig::grid) with training after the last stage.
    /// - [`PruneError::NeedsMasks`]: the model carries a reparameterization, but no masks on all of
    ///   the parameters to prune.
    /// - [`PruneError::MasksLost`]: `train` returns a model without the masks, or with others: those of a
    ///   checkpoint, say, that was saved in a stage that has been pruned anew since.
    /// - Whatever `train` returns, and as [`PrunerConfig::prune`].
    pub fn prune<M: Module, B: Batch, I: IntoIterator<Item = B>>(
        &self,
        model: M,
        loss: impl Fn(&M, &B) -> Tensor<1>,
        loader: impl FnMut(u64) -> I,
        mut train: impl FnMut(M, &Epoch) -> Result<M, Rejected<M, PruneError>>,
    ) -> Result<Pruned<M>, Rejected<M, PruneError>> {
        self.prune_by_stage(model, loss, loader, |model, training| {
            training.each_epoch(model, &mut train)
        })
    }

    /// Like [`prune`](Self::prune), with all epochs of a stage at once: for a training that has its own
    /// loop over epochs, Burn's `Learner` for example, see [`StageTraining`].
    ///
    /// `train_stage` is not called where a stage has no epochs.
    ///
    /// # Errors
    ///
    /// As [`prune`](Self::prune).
    pub fn prune_by_stage<M: Module, B: Batch, I: IntoIterator<Item = B>>(
        &self,
        model: M,
        loss: impl Fn(&M, &B) -> Tensor<1>,
        loader: impl FnMut(u64) -> I,
        mut train_stage: impl FnMut(M, &StageTraining) -> Result<M, Rejected<M, PruneError>>,
    ) -> Result<Pruned<M>, Rejected<M, PruneError>> {
        let rates = match Rates::new(self.learning_rate, self.last_learning_rate) {
            Ok(rates) => rates,
            Err(error) => return Err(Rejected::new(model, error)),
        };
        let stays = self.pruner.solver.grid.is_none() || self.last_epochs == 0;
        let expected = "none with epochs after the last stage, which would leave it";
        if let Err(error) = checks::accept(stays, "grid", "given", expected) {
            return Err(Rejected::new(model, error));
        }
        let carries_masks = match self.carries_masks(&model) {
            Ok(carries_masks) => carries_masks,
            Err(error) => return Err(Rejected::new(model, error)),
        };
        let after_stage = |model, masks: &Masks, stage: &StageReport| {
            let training = StageTraining::new(
                (stage.stage, stage.stages),
                (self.epochs, self.last_epochs),
                rates,
            );
            let model = match carries_masks {
                true => masks.replace(model)?,
                false => masks.attach(model)?,
            };
            let model = training.run(model, masks, &mut train_stage)?;
            Ok(match carries_masks {
                true => model,
                false => model.materialize(),
            })
        };
        let training = [
            ("epochs", self.epochs as f64),
            ("last_epochs", self.last_epochs as f64),
            ("learning_rate", self.learning_rate),
            ("last_learning_rate", self.last_learning_rate),
        ];
        self.pruner.run(model, loss, loader, after_stage, &training)
    }

    /// Whether the model comes with masks on all parameters to prune; fails where it comes with
    /// something else.
    fn carries_masks<M: Module>(&self, model: &M) -> Result<bool, PruneError> {
        let Some(Attached { path, name, .. }) = attached(model).into_iter().next() else {
            return Ok(false);
        };
        let selection = self.pruner.select(model)?;
        let masks = Masks::of(model)?;
        let layers = selection.layout().layers();
        let without = layers.iter().find(|layer| masks.get(&layer.path).is_none());
        match without {
            None => Ok(true),
            Some(layer) => Err(PruneError::NeedsMasks {
                path: layer.path.clone(),
                carrying: path,
                existing: name,
            }),
        }
    }
}
