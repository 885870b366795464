//! Block by block through a model.

use std::path::PathBuf;
use std::time::Instant;

use burn::module::{Module, ParamGroup};
use burn_lean_graph::{Pass, Results, Tensors, Walk};
use burn_lean_layerwise::LayerwiseError;
use burn_lean_reparam::{Rejected, reductions};

use crate::block::{Block, Layer, blocks, blocks_of, check_called, left};
use crate::collect::floats;
use crate::state::{Finished, State, checksum, fingerprint};
use crate::work::{Work, put};
use crate::{BlockReport, CompressedWeight, OneShotError, Preset, Report, Target};

/// Compresses a model without training, from calibration inputs alone, as a [`Preset`] says.
///
/// Block by block, and for each group of layers that read the same input:
///
/// 1. XᵀX of that input is summed over all batches, as the model with everything compressed so far gives
///    it, and with [`Target::Original`] also XᵀY, with what the original model gives there.
/// 2. Each weight is pruned, rounded to a grid, or both, by this quadratic.
/// 3. The weights are put in place, so that what comes later sees, and makes good for, what they changed.
///    With [`Order::Block`](crate::Order::Block) that is when all groups of the block are done.
///
/// Presets that ask nothing of the inputs, such as [`Preset::w8a16`], sum up nothing.
pub struct OneShot<'a> {
    pub(crate) preset: Preset,
    pub(crate) state: Option<PathBuf>,
    pub(crate) group: Option<ParamGroup>,
    spill: Option<PathBuf>,
    progress: Option<Box<Progress<'a>>>,
    /// CRC-32 of the last part's state, and so of all before it.
    behind: u32,
}

/// The place of a model that is a part of another one.
pub(crate) struct Part<I> {
    /// What its block is called; `None` for a model with blocks of its own.
    pub(crate) name: Option<String>,
    /// Blocks before it, and of all.
    pub(crate) before: usize,
    pub(crate) of: Option<usize>,
    /// What arrives at it.
    pub(crate) arrives: Arrives<I>,
}

/// What arrives at a part.
pub(crate) enum Arrives<I> {
    /// The first one: what was given.
    Given(Vec<I>),
    /// What the parts before it give.
    After(Results<I>),
}

impl<I> Part<I> {
    /// The name of its folder.
    fn number(&self) -> String {
        format!("{:04}", self.before)
    }
}

/// Told of each block that is done, with its number and how many there are.
type Progress<'a> = dyn FnMut(&BlockReport, usize, usize) + 'a;

impl std::fmt::Debug for OneShot<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("OneShot")
            .field("preset", &self.preset)
            .field("state", &self.state)
            .field("group", &self.group)
            .field("spill", &self.spill)
            .finish_non_exhaustive()
    }
}

/// A compressed model.
#[derive(Debug, Clone)]
pub struct Compressed<M> {
    /// The model, with zeros and grid points as values of its parameters.
    pub model: M,
    /// What was done.
    pub report: Report,
    /// The compressed weights, with codes and scales.
    pub weights: Vec<CompressedWeight>,
}

impl<'a> OneShot<'a> {
    /// By this preset.
    pub fn new(preset: Preset) -> Self {
        Self {
            preset,
            state: None,
            group: None,
            spill: None,
            progress: None,
            behind: 0,
        }
    }

    /// Takes the blocks in which `group` has a weight, in place of [`Preset::blocks`]: of those that are found
    /// by themselves, whole (`layers.0` for a group of `layers.0.attention`). What is in no such block stays.
    pub fn with_blocks_of(mut self, group: ParamGroup) -> Self {
        self.group = Some(group);
        self
    }

    /// Keeps each finished block in `folder`, and goes on after the last one that is there. Each file
    /// is written beside its place and moved there when complete, so that the process can end at any
    /// moment. Another machine may go on: inputs, parameters, operations, tables that the model has computed (of
    /// rotations, which a GPU may round otherwise) and the preset have to be the same.
    pub fn with_state(mut self, folder: impl Into<PathBuf>) -> Self {
        self.state = Some(folder.into());
        self
    }

    /// Keeps activations between layers, and between blocks, in files in `folder`: one batch at a time is in
    /// memory.
    pub fn spilling_to(mut self, folder: impl Into<PathBuf>) -> Self {
        self.spill = Some(folder.into());
        self
    }

    /// Calls `progress` after each block, with its number from 1 on and how many there are.
    pub fn with_progress(mut self, progress: impl FnMut(&BlockReport, usize, usize) + 'a) -> Self {
        self.progress = Some(Box::new(progress));
        self
    }

    /// Compresses `model`, a model in evaluation mode: one that trains is given as `model.valid()`.
    ///
    /// `batches` are calibration inputs, each as `forward` takes it, of any sizes. Where something is
    /// solved for (anything but magnitude, Wanda and nearest codes with [`Target::OwnInputs`]) they need
    /// at least as many rows (tokens, or positions of images) together as the widest compressed layer has
    /// inputs. `forward` is recorded, once for each batch: it cannot read values of tensors (`into_data`,
    /// an `if` on a number).
    ///
    /// # Errors
    ///
    /// Each with the model inside, unchanged.
    /// - [`OneShotError::InvalidConfig`]: what [`Preset::validate`] finds.
    /// - [`OneShotError::Graph`]: the forward pass cannot be recorded or executed, or there is no batch.
    /// - [`OneShotError::NothingToCompress`], [`OneShotError::EmptyBlock`], [`OneShotError::NeverCalled`],
    ///   [`OneShotError::SharedWeight`]: no weight is left, a part is not called, or several operations
    ///   read one weight.
    /// - [`OneShotError::TooFewRows`]: fewer rows than inputs of a layer.
    /// - [`OneShotError::DoesNotFit`]: groups of a pattern do not divide the inputs of a layer.
    /// - [`OneShotError::Layer`]: inputs or weights of a layer are not finite, or its system has no
    ///   factor: more rows, or a larger [`ridge`](Preset::ridge).
    /// - [`OneShotError::File`]: the state folder is of another run, damaged, or cannot be written.
    pub fn compress<M: Module, I: Tensors, O: Tensors>(
        mut self,
        model: M,
        batches: impl IntoIterator<Item = I>,
        forward: impl Fn(&M, I) -> O,
    ) -> Result<Compressed<M>, Rejected<M, OneShotError>> {
        let whole = Part {
            name: None,
            before: 0,
            of: None,
            arrives: Arrives::Given(batches.into_iter().collect()),
        };
        match self.run(&model, &forward, whole) {
            Ok((walk, report, weights)) => Ok(Compressed {
                model: walk.into_model(model),
                report,
                weights,
            }),
            Err(error) => Err(Rejected::new(model, error)),
        }
    }

    /// The walk through `model` up to its last compressed layer.
    pub(crate) fn run<M: Module, I: Tensors, O: Tensors>(
        &mut self,
        model: &M,
        forward: &impl Fn(&M, I) -> O,
        part: Part<I>,
    ) -> Result<(Walk<O>, Report, Vec<CompressedWeight>), OneShotError> {
        self.preset.validate()?;
        self.preset = self.preset.clone().with_real_target();
        let folder = match part.of {
            Some(_) => self.state.as_ref().map(|all| all.join(part.number())),
            None => self.state.clone(),
        };
        let folder = folder.map(|folder| {
            let batches = match &part.arrives {
                Arrives::Given(batches) => checksum(batches),
                // What the parts before it have become says what they give, but for the last bits, which are
                // those of a machine.
                Arrives::After(_) => self.behind,
            };
            (folder, batches)
        });
        let Part {
            name,
            before,
            of,
            arrives,
        } = part;
        let spill = self.spill.as_deref();
        let mut walk = match arrives {
            Arrives::Given(batches) => {
                let mut walk = Walk::record(model, batches, forward)?;
                if self.preset.target == Target::Original {
                    walk = walk.with_original();
                }
                match spill {
                    Some(folder) => walk.spilling_to(folder)?,
                    None => walk,
                }
            }
            Arrives::After(results) => Walk::record_after(model, &results, forward, spill)?,
        };
        let only = self.group.as_ref().map(|group| blocks_of(&walk, group));
        if only.is_some() {
            self.preset.blocks = None;
        }
        let blocks = blocks(&walk, &self.preset, only.as_ref(), name.as_deref())?;
        if name.is_none() && self.preset.blocks.is_none() {
            check_called(model, walk.graph(), &blocks, self.group.as_ref())?;
        }
        // Said before the first block takes its hours.
        for layer in blocks.iter().flat_map(Block::layers) {
            let (rows, inputs) = (walk.row_count(&layer.product), layer.product.inputs);
            self.preset.check_layer(layer.path(), inputs, rows)?;
        }
        for layer in blocks.iter().flat_map(Block::layers) {
            check_finite(&walk, layer)?;
        }
        // A run that is refused leaves nothing behind that would refuse the next one.
        let mut state = match folder {
            None => None,
            Some((folder, batches)) => {
                let of = fingerprint(model, walk.graph(), batches, &self.preset, only.as_ref());
                Some(State::open(&folder, of)?)
            }
        };
        let of = of.unwrap_or(blocks.len());
        let mut report = Report {
            left: left(&walk, &self.preset, only.as_ref()),
            ..Report::default()
        };
        if !report.left.is_empty() {
            tracing::warn!(
                weights = report.left.join(", "),
                "no matrices of their own: they stay as they are"
            );
        }
        let mut weights = Vec::new();
        for (number, block) in blocks.iter().enumerate() {
            let start = Instant::now();
            if !self.preset.is_blind() {
                walk.advance(|node| node.index() >= block.first)?;
            }
            let stored = match &state {
                Some(state) => state.load(number, &block.path)?,
                None => None,
            };
            let done = match stored {
                Some(done) => done,
                None => {
                    let mut work = Work {
                        walk: &mut walk,
                        preset: &self.preset,
                        done: Finished::new(&block.path),
                    };
                    work.block(block)?;
                    let mut done = work.done;
                    done.block.seconds = start.elapsed().as_secs_f64();
                    if let Some(state) = &state {
                        state.store(number, &done)?;
                    }
                    done
                }
            };
            if let Some(state) = &mut state {
                state.note(&done);
            }
            put(&mut walk, block, &done)?;
            tracing::info!(
                block = block.path,
                number = before + number + 1,
                of,
                seconds = done.block.seconds,
                "compressed"
            );
            if let Some(progress) = &mut self.progress {
                progress(&done.block, before + number + 1, of);
            }
            report.layers.extend(done.layers);
            report.blocks.push(done.block);
            weights.extend(done.weights);
        }
        self.behind = state.map_or(0, State::checksum);
        report.rows = report.layers.first().map_or(0, |layer| layer.rows);
        Ok((walk, report, weights))
    }
}

/// Refuses a weight with a NaN or an infinity.
fn check_finite<O: Tensors>(walk: &Walk<O>, layer: &Layer) -> Result<(), OneShotError> {
    let weight = walk.weight(&layer.product, Pass::Original)?;
    if reductions::all(weight.clone().is_finite()).into_scalar::<bool>() {
        return Ok(());
    }
    let values = floats(weight);
    let index = values.iter().position(|value| !value.is_finite());
    Err(OneShotError::Layer {
        path: layer.path().into(),
        source: LayerwiseError::NotFinite {
            what: "the dense weights",
            index: index.unwrap_or(0),
        },
    })
}
