//! Block by block through a model.

use std::path::PathBuf;
use std::time::Instant;

use burn::module::Module;
use burn::tensor::{Tensor, TensorData};
use burn_lean_graph::{Pass, Tensors, Walk};
use burn_lean_layerwise::Gram;
use burn_lean_reparam::Rejected;

use crate::collect::{Sums, collect, floats};
use crate::scaling::scale;
use crate::solve::compress;
use crate::state::{Finished, State, fingerprint};
use crate::structure::{Block, Group, Layer, blocks};
use crate::{
    BlockReport, CompressedWeight, LayerReport, OneShotError, Order, Preset, Report, Target,
};

/// One-shot compression by a [`Preset`].
pub struct OneShot<'a> {
    preset: Preset,
    state: Option<PathBuf>,
    spill: Option<PathBuf>,
    progress: Option<Box<Progress<'a>>>,
}

/// Told of each block that is done, with its number and how many there are.
type Progress<'a> = dyn FnMut(&BlockReport, usize, usize) + 'a;

impl std::fmt::Debug for OneShot<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("OneShot")
            .field("preset", &self.preset)
            .field("state", &self.state)
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
            spill: None,
            progress: None,
        }
    }

    /// Keeps each finished block in `folder`, and goes on after the last one that is there. Each file
    /// is written beside its place and moved there when complete, so that the process can end at any
    /// moment.
    pub fn with_state(mut self, folder: impl Into<PathBuf>) -> Self {
        self.state = Some(folder.into());
        self
    }

    /// Keeps activations between layers in files in `folder`: one batch at a time is in memory.
    pub fn spilling_to(mut self, folder: impl Into<PathBuf>) -> Self {
        self.spill = Some(folder.into());
        self
    }

    /// Calls `progress` after each block, with its number from 1 on and how many there are.
    pub fn with_progress(mut self, progress: impl FnMut(&BlockReport, usize, usize) + 'a) -> Self {
        self.progress = Some(Box::new(progress));
        self
    }

    /// Compresses `model`, an evaluation model (`model.valid()`), by calibration batches.
    ///
    /// # Errors
    ///
    /// Each with the model inside, unchanged: those of [`OneShotError`].
    pub fn compress<M: Module, I: Tensors, O: Tensors>(
        mut self,
        model: M,
        batches: impl IntoIterator<Item = I>,
        forward: impl Fn(&M, I) -> O,
    ) -> Result<Compressed<M>, Rejected<M, OneShotError>> {
        match self.run(&model, batches, forward) {
            Ok((walk, report, weights)) => Ok(Compressed {
                model: walk.into_model(model),
                report,
                weights,
            }),
            Err(error) => Err(Rejected::new(model, error)),
        }
    }

    fn run<M: Module, I: Tensors, O: Tensors>(
        &mut self,
        model: &M,
        batches: impl IntoIterator<Item = I>,
        forward: impl Fn(&M, I) -> O,
    ) -> Result<(Walk<O>, Report, Vec<CompressedWeight>), OneShotError> {
        self.preset.validate()?;
        // A producer that was rescaled does not give what it gave.
        if self.preset.scaling.is_some() {
            self.preset.target = Target::OwnInputs;
        }
        let batches: Vec<I> = batches.into_iter().collect();
        let mut state = match &self.state {
            None => None,
            Some(folder) => Some(State::open(
                folder,
                fingerprint(model, &batches, &self.preset)?,
            )?),
        };
        let mut walk = Walk::record(model, batches, forward)?;
        if self.preset.target == Target::Original {
            walk = walk.with_original();
        }
        if let Some(folder) = &self.spill {
            walk = walk.spilling_to(folder)?;
        }
        let blocks = blocks(&walk, &self.preset)?;
        let mut report = Report::default();
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
                    if let Some(state) = &mut state {
                        state.store(number, &done)?;
                    }
                    done
                }
            };
            put(&mut walk, block, &done)?;
            tracing::info!(
                block = block.path,
                number = number + 1,
                of = blocks.len(),
                seconds = done.block.seconds,
                "compressed"
            );
            if let Some(progress) = &mut self.progress {
                progress(&done.block, number + 1, blocks.len());
            }
            report.layers.extend(done.layers);
            report.blocks.push(done.block);
            weights.extend(done.weights);
        }
        report.rows = report.layers.first().map_or(0, |layer| layer.rows);
        Ok((walk, report, weights))
    }
}

/// The work on one block.
struct Work<'a, O> {
    walk: &'a mut Walk<O>,
    preset: &'a Preset,
    done: Finished,
}

impl<O: Tensors> Work<'_, O> {
    fn block(&mut self, block: &Block) -> Result<(), OneShotError> {
        if self.preset.is_blind() {
            for group in &block.groups {
                self.solve(group, None, Pass::Replaced)?;
            }
            return Ok(());
        }
        let mark = self.walk.mark();
        // The first operation of the block may be its first product: it is to be shown again.
        self.walk.rewind(&mark);
        let again = self.preset.scaling.is_some() || self.preset.order == Order::Block;
        let mark = again.then_some(mark);
        if self.preset.scaling.is_some() {
            let mut collected = Vec::new();
            for group in &block.groups {
                collected.push(self.collect(group)?);
            }
            for (group, sums) in block.groups.iter().zip(&collected) {
                if scale(self.walk, group, sums, self.preset)? {
                    self.note_vectors(group)?;
                }
            }
            mark.iter().for_each(|mark| self.walk.rewind(mark));
        }
        match self.preset.order {
            Order::Layer => {
                for group in &block.groups {
                    let sums = self.collect(group)?;
                    let from = self.done.weights.len();
                    self.solve(group, Some(&sums), Pass::Replaced)?;
                    for (layer, weight) in group.layers.iter().zip(&self.done.weights[from..]) {
                        put_weight(self.walk, &layer.product, weight)?;
                    }
                }
            }
            Order::Block => {
                let mut collected = Vec::new();
                for group in &block.groups {
                    collected.push(self.collect(group)?);
                }
                for (group, sums) in block.groups.iter().zip(&collected) {
                    self.solve(group, Some(sums), Pass::Replaced)?;
                }
                mark.iter().for_each(|mark| self.walk.rewind(mark));
            }
        }
        Ok(())
    }

    fn collect(&mut self, group: &Group) -> Result<Sums, OneShotError> {
        let first = group.layers[0].product.node;
        let bytes = self.walk.live_bytes();
        let Some(mut step) = self.walk.advance(|node| node.index() == first)? else {
            return Err(OneShotError::NeverCalled {
                path: group.layers[0].path().into(),
            });
        };
        let sums = collect(&mut step, group, self.preset.target)?;
        let block = &mut self.done.block;
        block.activation_bytes = block
            .activation_bytes
            .max(bytes)
            .max(self.walk.live_bytes());
        block.gram_bytes = block.gram_bytes.max(sums.bytes());
        Ok(sums)
    }

    /// Whether the parameter of a layer, `dense` by outputs, lies by inputs.
    fn is_transposed(&self, layer: &Layer, dense: &[f32], pass: Pass) -> bool {
        let parameter = self.walk.parameter::<2>(layer.path(), pass).map(floats);
        parameter.is_ok_and(|own| {
            own != dense && own == crate::file::transposed(dense, layer.product.inputs)
        })
    }

    /// Parameters with one dimension that scaling has changed.
    fn note_vectors(&mut self, group: &Group) -> Result<(), OneShotError> {
        for path in group.producer.iter().flat_map(|producer| &producer.vectors) {
            let value = self.walk.parameter::<1>(path, Pass::Replaced)?;
            self.done.vectors.retain(|(other, _)| other != path);
            self.done.vectors.push((path.clone(), floats(value)));
        }
        Ok(())
    }

    fn solve(
        &mut self,
        group: &Group,
        sums: Option<&Sums>,
        pass: Pass,
    ) -> Result<(), OneShotError> {
        for (at, layer) in group.layers.iter().enumerate() {
            let product = &layer.product;
            let path = layer.path();
            let dense = floats(self.walk.weight(product, pass)?);
            let per_group = product.outputs_per_group();
            let mut weight = CompressedWeight {
                path: path.into(),
                outputs: product.outputs,
                inputs: product.inputs,
                transposed: self.is_transposed(layer, &dense, pass),
                values: Vec::new(),
                grid: None,
            };
            let (mut objective, mut scale, mut dead, mut rows) = (0.0, 0.0, 0, 0);
            for part in 0..product.groups {
                let gram = match sums {
                    Some(sums) => {
                        rows = sums.rows();
                        sums.of(group, at, part)
                    }
                    None => unit(product.inputs, path)?,
                };
                let size = per_group * product.inputs;
                let own = &dense[part * size..(part + 1) * size];
                let solved = compress(&gram, own, self.preset, path)?;
                objective += solved.objective;
                scale += solved.scale;
                dead = dead.max(solved.dead_inputs);
                weight.values.extend(solved.values);
                match (&mut weight.grid, solved.grid) {
                    (Some(grid), Some(more)) => {
                        grid.codes.extend(more.codes);
                        grid.scales.extend(more.scales);
                        grid.zero_points.extend(more.zero_points);
                    }
                    (grid, more) => *grid = more,
                }
            }
            self.done.layers.push(LayerReport {
                path: path.into(),
                rows,
                dead_inputs: dead,
                relative_error: objective / scale.max(f64::MIN_POSITIVE),
                zeros: weight.zeros(),
                weights: weight.values.len(),
                bytes: weight.stored_bytes(),
            });
            self.done.weights.push(weight);
        }
        Ok(())
    }
}

/// The sums of inputs that are all equally large and have nothing in common.
fn unit(inputs: usize, path: &str) -> Result<Gram, OneShotError> {
    let mut gram = Gram::new(inputs);
    for at in 0..inputs {
        let row: Vec<f32> = (0..inputs)
            .map(|j| if j == at { 1.0 } else { 0.0 })
            .collect();
        gram.add(&row).map_err(|source| OneShotError::Layer {
            path: path.into(),
            source,
        })?;
    }
    Ok(gram)
}

/// A finished block in the place of the original one.
fn put<O: Tensors>(walk: &mut Walk<O>, block: &Block, done: &Finished) -> Result<(), OneShotError> {
    for (path, values) in &done.vectors {
        let old = walk.parameter::<1>(path, Pass::Replaced)?;
        let values = TensorData::from(values.as_slice());
        walk.replace(
            path,
            Tensor::<1>::from_data(values, (&old.device(), old.dtype())),
        )?;
    }
    for layer in block.layers() {
        if let Some(weight) = done.weights.iter().find(|one| one.path == layer.path()) {
            put_weight(walk, &layer.product, weight)?;
        }
    }
    Ok(())
}

fn put_weight<O: Tensors>(
    walk: &mut Walk<O>,
    product: &burn_lean_graph::Product,
    weight: &CompressedWeight,
) -> Result<(), OneShotError> {
    let old = walk.weight(product, Pass::Replaced)?;
    let values = TensorData::new(weight.values.clone(), [weight.outputs, weight.inputs]);
    let values = Tensor::<2>::from_data(values, (&old.device(), old.dtype()));
    Ok(walk.replace_weight(product, values)?)
}
