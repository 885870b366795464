//! The ways in which a model can be run here, one after another.

use burn_lean_graph::Tensors;
use burn_lean_kernels::Storage;
use burn_lean_reparam::catch_quietly;

use super::candidates::{Candidate, Way};
use super::example::Example;
use super::integers::check_integers;
use super::own::{Keep, Runner};
use super::pools::Pools;
use super::report::SparseLayer;
use super::{Arithmetic, Backend, EngineConfig, FloatStorage, integer_kernels};
use crate::export::{Limits, Weights};
use crate::{DeployError, Execution, Export, Exported, Form, LayerReport, OnnxModel};

/// What is known when all ways were made.
pub(super) struct Made {
    pub(super) example: Example,
    /// Float weights of which half is zero.
    pub(super) zeros: Vec<SparseLayer>,
}

/// Makes what a configuration allows, one way after another, each for `take`; an error for what cannot run
/// the model. What `take` drops has gone before the next one is made.
pub(super) fn each<O: Tensors>(
    export: &Export<O>,
    config: &EngineConfig,
    pools: &Pools,
    mut take: impl FnMut(Result<Candidate, DeployError>, &Example),
) -> Result<Made, DeployError> {
    let mut forms = Forms::of(export, config)?;
    let floats = config.arithmetic != Arithmetic::Integer || forms.integer.is_none();
    let model = forms.model()?;
    if config.backend != Some(Backend::Burn) {
        check_integers(model)?;
    }
    let ways = Ways { config, pools };
    let forced = config.backend.is_some();
    // Burn's threads are those of the pool that calls.
    let burn = floats && ways.allows(Backend::Burn) && (config.threads == 0 || forced);
    if !burn && config.backend != Some(Backend::Burn) {
        check_volumes(model)?;
    }
    let example = Example::of(export, &model.inputs, 0)?;
    let mut take = |candidate| take(candidate, &example);
    let mut is_loaded = false;
    if let Some(integer) = forms.integer.take() {
        ways.own_integers(&integer, &mut take);
        drop(integer);
        is_loaded = ways.rten_integers(&forms, floats, &mut take)?;
    }
    if !floats {
        let zeros = Vec::new();
        return Ok(Made { example, zeros });
    }
    let float = forms.into_float()?;
    let zeros = ways.own_floats(&float, &example, &mut take);
    let bare = float.without_constants();
    let constant_bytes = float.model.constant_bytes();
    let loads = !forced || !is_loaded || config.arithmetic == Arithmetic::Fastest;
    // Its loops have no result where they have no steps.
    let loads = loads && (forced || !float.model.has_loops());
    if ways.allows(Backend::Rten) && loads {
        take(Candidate::rten(float, pools, ""));
    }
    if burn {
        let one = Candidate {
            backend: Backend::Burn,
            exported: bare,
            way: Way::Burn(export.rounded_parameters()?),
            note: "",
            sparse: Vec::new(),
            resident_bytes: constant_bytes,
        };
        take(Ok(one));
    }
    Ok(Made { example, zeros })
}

/// A model as the ways to run it are made from.
struct Forms<'a, O> {
    export: &'a Export<O>,
    weights: Weights,
    /// Where layers of it are computed in integers.
    integer: Option<Exported>,
    /// Why none is.
    reasons: Option<Vec<LayerReport>>,
    /// Made once it is needed: it is the largest.
    float: Option<Exported>,
}

/// What the engine's own operations take.
fn own_limits() -> Limits {
    Limits {
        no_volumes: true,
        engine_operators: true,
        wide_integers: true,
        ..Limits::default()
    }
}

impl<'a, O: Tensors> Forms<'a, O> {
    fn of(export: &'a Export<O>, config: &EngineConfig) -> Result<Self, DeployError> {
        let weights = export.weights()?;
        let (mut integer, mut reasons) = (None, None);
        if config.arithmetic != Arithmetic::Float {
            let written = export.write(&weights, Form::Integer, own_limits())?;
            match written.layers.iter().any(LayerReport::is_integer) {
                true => integer = Some(written),
                // The same model, with the reasons why.
                false => reasons = Some(written.layers),
            }
        }
        Ok(Self {
            export,
            weights,
            integer,
            reasons,
            float: None,
        })
    }

    /// In integers, or else in floats.
    fn model(&mut self) -> Result<&OnnxModel, DeployError> {
        if self.integer.is_none() && self.float.is_none() {
            self.float = Some(self.float()?);
        }
        let written = self.integer.as_ref().or(self.float.as_ref());
        Ok(&written.expect("one of the two was written").model)
    }

    fn float(&self) -> Result<Exported, DeployError> {
        let mut float = self
            .export
            .write(&self.weights, Form::Float, own_limits())?;
        if let Some(layers) = &self.reasons {
            float.layers.clone_from(layers);
        }
        Ok(float)
    }

    /// Lets go of the weights.
    fn into_float(mut self) -> Result<Exported, DeployError> {
        match self.float.take() {
            Some(float) => Ok(float),
            None => self.float(),
        }
    }
}

/// What a configuration allows.
struct Ways<'a> {
    config: &'a EngineConfig,
    pools: &'a Pools,
}

impl Ways<'_> {
    fn allows(&self, backend: Backend) -> bool {
        self.config.backend.is_none_or(|one| one == backend)
    }

    /// How weights are kept that are floats, and what is said of it.
    fn storage(&self) -> (Keep, &'static str) {
        let (floats, note) = match self.config.weights {
            FloatStorage::F32 => (Storage::F32, ""),
            FloatStorage::F16 => (Storage::F16, "weights in F16"),
            FloatStorage::BF16 => (Storage::BF16, "weights in BF16"),
        };
        let keep = Keep {
            floats,
            ..Keep::default()
        };
        (keep, note)
    }

    fn packed(
        &self,
        exported: &Exported,
        keep: Keep,
        note: &'static str,
    ) -> Result<Candidate, DeployError> {
        let runner = Runner::new(&exported.model, keep, self.pools)?;
        Ok(Candidate::own(exported, runner, note))
    }

    fn own_integers(
        &self,
        integer: &Exported,
        take: &mut impl FnMut(Result<Candidate, DeployError>),
    ) {
        if !self.allows(Backend::Own) {
            return;
        }
        let (keep, _) = self.storage();
        take(self.packed(integer, keep, "integers"));
        let many_rows = Keep {
            many_rows: true,
            ..keep
        };
        if let Ok(runner) = Runner::new(&integer.model, many_rows, self.pools)
            && runner.has_many_rows()
        {
            let one = Candidate::own(integer, runner, "integers, for many rows");
            take(Ok(one));
        }
    }

    /// Where rten's products are exact as they are; elsewhere they were never faster. Whether it was given the
    /// model.
    fn rten_integers<O: Tensors>(
        &self,
        forms: &Forms<'_, O>,
        floats: bool,
        take: &mut impl FnMut(Result<Candidate, DeployError>),
    ) -> Result<bool, DeployError> {
        let kernels = integer_kernels();
        let forced = self.config.backend.is_some();
        if !self.allows(Backend::Rten) || !forced && kernels.products_saturate {
            return Ok(false);
        }
        let limits = Limits {
            narrow_products: kernels.products_saturate,
            no_convolutions: !kernels.exact_convolutions,
            no_volumes: true,
            narrow_blocks: true,
            no_zero_points: true,
            engine_operators: false,
            wide_integers: true,
        };
        let written = forms.export.write(&forms.weights, Form::Integer, limits)?;
        if !forced && written.model.has_loops() {
            return Ok(false);
        }
        // Weights alone it dequantizes in every run.
        let pays = |layer: &LayerReport| match forced {
            true => layer.is_integer(),
            false => matches!(layer.execution, Execution::Integer),
        };
        if written.layers.iter().any(pays) {
            take(Candidate::rten(written, self.pools, "integers"));
            return Ok(true);
        }
        if !floats {
            take(Err(no_kernel(&written.layers)));
        }
        Ok(false)
    }

    /// What became of weights with many zeros.
    fn own_floats(
        &self,
        float: &Exported,
        example: &Example,
        take: &mut impl FnMut(Result<Candidate, DeployError>),
    ) -> Vec<SparseLayer> {
        if !self.allows(Backend::Own) {
            return Vec::new();
        }
        let (keep, note) = self.storage();
        take(self.packed(float, keep, note));
        if keep.floats != Storage::F32 && self.config.backend.is_none() {
            take(self.packed(float, Keep::default(), ""));
        }
        let sparse = Keep {
            sparse: true,
            ..keep
        };
        if let Ok(mut runner) = Runner::new(&float.model, sparse, self.pools)
            && let Ok(Ok(layers)) = catch_quietly(|| runner.settle(example.values.clone()))
        {
            if layers.iter().any(SparseLayer::is_left_out) {
                let mut one = Candidate::own(float, runner, "sparse");
                one.sparse = layers.clone();
                take(Ok(one));
            }
            return layers;
        }
        Vec::new()
    }
}

/// rten reads convolutions along three axes, and does not run them.
fn check_volumes(model: &OnnxModel) -> Result<(), DeployError> {
    let weights = model.initializers.iter().filter(|one| one.shape.len() == 5);
    let volumes: Vec<&str> = weights.map(|one| one.name.as_str()).collect();
    let mut nodes = model.nodes.iter();
    let found = nodes.find_map(|node| {
        let is_convolution = matches!(node.operator(), "Conv" | "ConvTranspose");
        let weight = node.inputs.get(1).filter(|_| is_convolution)?;
        volumes.contains(&weight.as_str()).then_some(weight)
    });
    match found {
        None => Ok(()),
        Some(weight) => Err(DeployError::Load {
            reason: format!(
                "`{weight}` is of a convolution along three axes, which Burn alone runs"
            ),
        }),
    }
}

/// Of layers with codes, none of which rten computes in integers.
fn no_kernel(layers: &[LayerReport]) -> DeployError {
    // Most share a reason.
    let mut reasons: Vec<(&str, Vec<&str>)> = Vec::new();
    for layer in layers {
        let Some(reason) = &layer.reason else {
            continue;
        };
        match reasons.iter_mut().find(|(known, _)| known == reason) {
            Some((_, paths)) => paths.push(&layer.path),
            None => reasons.push((reason, vec![&layer.path])),
        }
    }
    let said = reasons.iter().map(|(reason, paths)| match &paths[..] {
        [path] => format!("`{path}`: {reason}"),
        paths => format!("`{}` and {} more: {reason}", paths[0], paths.len() - 1),
    });
    DeployError::Load {
        reason: format!(
            "rten computes none of its layers in integers: allow another backend, or \
             `Arithmetic::Fastest` ({})",
            said.collect::<Vec<_>>().join("; ")
        ),
    }
}
