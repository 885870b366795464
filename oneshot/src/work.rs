//! One block of a walk: what arrives is summed up, weights are solved for and put in place.

use std::sync::OnceLock;

use burn::tensor::{Tensor, TensorData};
use burn_lean_graph::{Pass, Product, Tensors, Walk};

use crate::block::{Block, Group};
use crate::collect::{Sums, collect, floats};
use crate::scaling::scale;
use crate::solve::{compress, compress_blindly};
use crate::state::Finished;
use crate::{CompressedWeight, LayerReport, OneShotError, Order, Preset};

/// The work on one block.
pub(crate) struct Work<'a, O> {
    pub(crate) walk: &'a mut Walk<O>,
    pub(crate) preset: &'a Preset,
    pub(crate) done: Finished,
}

impl<O: Tensors> Work<'_, O> {
    pub(crate) fn block(&mut self, block: &Block) -> Result<(), OneShotError> {
        if self.preset.is_blind() {
            for group in &block.groups {
                self.solve(group, None)?;
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
                    self.solve(group, Some(&sums))?;
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
                    self.solve(group, Some(sums))?;
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
        let sums = collect(&mut step, group, self.preset)?;
        let block = &mut self.done.block;
        block.activation_bytes = block
            .activation_bytes
            .max(bytes)
            .max(self.walk.live_bytes());
        block.gram_bytes = block.gram_bytes.max(sums.bytes());
        Ok(sums)
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

    fn solve(&mut self, group: &Group, sums: Option<&Sums>) -> Result<(), OneShotError> {
        // H, its ridge and the order of inputs are of XᵀX alone, the same for all layers of the group.
        let parts = match group.layers.len() {
            1 => 0,
            _ => group.layers[0].product.groups,
        };
        let shared: Vec<OnceLock<_>> = (0..parts).map(|_| OnceLock::new()).collect();
        for (at, layer) in group.layers.iter().enumerate() {
            let product = &layer.product;
            let path = layer.path();
            let dense = floats(self.walk.weight(product, Pass::Replaced)?);
            let per_group = product.outputs_per_group();
            let mut weight = CompressedWeight {
                path: path.into(),
                outputs: product.outputs,
                inputs: product.inputs,
                transposed: product.is_transposed(),
                values: Vec::new(),
                grid: None,
            };
            // Objective and what it is a part of: of outputs, and of weights where nothing arrives.
            let (mut of_outputs, mut of_weights) = ((0.0, 0.0), (0.0, 0.0));
            let (mut dead, mut rows, mut unseen) = (0, 0, 0);
            let mut ridge = 0.0_f64;
            for part in 0..product.groups {
                let size = per_group * product.inputs;
                let own = &dense[part * size..(part + 1) * size];
                let solved = match sums {
                    Some(sums) => {
                        rows = sums.rows();
                        let gram = sums.of(group, at, part);
                        compress(gram, own, self.preset, path, shared.get(part))?
                    }
                    None => compress_blindly(own, product.inputs, self.preset, path)?,
                };
                let error = match solved.is_unseen {
                    true => &mut of_weights,
                    false => &mut of_outputs,
                };
                error.0 += solved.objective;
                error.1 += solved.scale;
                unseen += usize::from(solved.is_unseen);
                dead = dead.max(solved.dead_inputs);
                ridge = ridge.max(solved.ridge);
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
            if unseen > 0 {
                tracing::warn!(
                    path,
                    groups = unseen,
                    of = product.groups,
                    "nothing but zeros arrives: no weight is removed, and codes are the nearest ones"
                );
            }
            let (objective, scale): (f64, f64) = match unseen == product.groups {
                true => of_weights,
                false => of_outputs,
            };
            self.done.layers.push(LayerReport {
                path: path.into(),
                rows,
                dead_inputs: dead,
                own_targets: sums.map_or(0, |sums| sums.own_targets),
                ridge,
                relative_error: objective / scale.max(f64::MIN_POSITIVE),
                zeros: weight.zeros(),
                weights: weight.values.len(),
                bytes: weight.stored_bytes(),
                unscaled: self.preset.scaling.is_some() && group.producer.is_none(),
                unseen: unseen > 0,
            });
            self.done.weights.push(weight);
        }
        Ok(())
    }
}

/// A finished block in the place of the original one.
pub(crate) fn put<O: Tensors>(
    walk: &mut Walk<O>,
    block: &Block,
    done: &Finished,
) -> Result<(), OneShotError> {
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
    product: &Product,
    weight: &CompressedWeight,
) -> Result<(), OneShotError> {
    let old = walk.weight(product, Pass::Replaced)?;
    let values = TensorData::new(weight.values.clone(), [weight.outputs, weight.inputs]);
    let values = Tensor::<2>::from_data(values, (&old.device(), old.dtype()));
    Ok(walk.replace_weight(product, values)?)
}
