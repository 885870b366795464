//! What arrives at the weights that read units.

use std::collections::HashMap;

use burn::module::{Module, ParamId};
use burn::tensor::Tensor;
use burn_lean_graph::{GraphError, Pass, Product, Recording, Tensors, UnitAxis, Walk, cloned};
use burn_lean_reparam::reductions::AXIS;

use crate::PruneError;
use crate::host::read;
use crate::layerwise::stops::bias;

/// Of a recording or a walk that failed.
pub(super) fn failed(source: GraphError) -> PruneError {
    PruneError::of_graph(source, |source| PruneError::ShrinkNotRecorded { source })
}

/// A weight that reads units.
#[derive(Debug, Clone, PartialEq)]
struct Reader {
    /// For each of its inputs the number that always arrives, over examples, positions and padding;
    /// `None` where numbers differ.
    constants: Vec<Option<f32>>,
    /// The bias of the layer.
    bias: Option<ParamId>,
}

/// The weights that read units, by path and by the axis of their inputs: a tied weight may read along
/// both.
#[derive(Debug)]
pub(super) struct Readers(HashMap<(String, usize), Reader>);

impl Readers {
    /// Looks at what arrives at each weight on this batch.
    pub(super) fn of<M: Module, I: Tensors, O: Tensors>(
        model: &M,
        recording: Recording<O>,
        batch: &I,
    ) -> Result<Self, PruneError> {
        let again = cloned(batch);
        let mut walk = Walk::new(model, [(recording, again)]).map_err(failed)?;
        let biases = biases(&walk);
        let mut readers: HashMap<(String, usize), Reader> = HashMap::new();
        while let Some(mut step) = walk.next_product().map_err(failed)? {
            let products = step.product();
            let Some(product) = products.filter(|one| one.groups == 1 && !one.is_embedding())
            else {
                continue;
            };
            let mut bounds: Option<[Tensor<2>; 2]> = None;
            let look = |rows: Tensor<2>| {
                let here = [rows.clone().min_dim(0), rows.max_dim(0)];
                bounds = Some(match bounds.take() {
                    Some([low, high]) => {
                        let [a, b] = here;
                        [low.min_pair(a), high.max_pair(b)]
                    }
                    None => here,
                });
            };
            step.rows(&product, 0, Pass::Original, 0, AXIS, look)
                .map_err(failed)?;
            let Some([low, high]) = bounds else { continue };
            let (low, high) = (read(low)?, read(high)?);
            let axis = input_axis(&product);
            let inputs = product.parameter.shape.get(axis).copied().unwrap_or(1);
            // All places of a kernel see an input.
            let each = (low.len() / inputs.max(1)).max(1);
            let constants = low.chunks(each).zip(high.chunks(each)).map(|(low, high)| {
                let first = low[0];
                let all = low.iter().chain(high).all(|x| *x == first);
                (all && first.is_finite()).then_some(first)
            });
            let found = Reader {
                constants: constants.collect(),
                bias: biases.get(&product.node).copied(),
            };
            let known = readers
                .entry((product.parameter.path.clone(), axis))
                .or_insert_with(|| found.clone());
            // A weight with several uses: what differs is not constant.
            if *known != found {
                known.bias = None;
                let pairs = known.constants.iter_mut().zip(found.constants);
                pairs.for_each(|(known, found)| *known = known.filter(|x| found == Some(*x)));
            }
        }
        Ok(Self(readers))
    }

    /// The constant that arrives at these places, where it is one that can be left out or moved into
    /// a bias, with that bias; zeros move into none.
    pub(super) fn constants(
        &self,
        axis: &UnitAxis,
        unit: usize,
    ) -> Option<(Vec<f32>, Option<ParamId>)> {
        let reader = self.0.get(&(axis.path.clone(), axis.axis))?;
        let places = axis.places[unit].iter();
        let constants = places.map(|place| *reader.constants.get(*place)?);
        let constants: Vec<f32> = constants.collect::<Option<_>>()?;
        let is_zero = constants.iter().all(|x| *x == 0.0);
        let bias = reader.bias.filter(|_| !is_zero);
        (is_zero || bias.is_some()).then_some((constants, bias))
    }
}

/// The axis of a weight along which its inputs lie.
fn input_axis(product: &Product) -> usize {
    // A matrix with one row or column is not transposed, whichever way it lies.
    let is_stored = product.parameter.shape.first() == Some(&product.outputs);
    usize::from(!product.is_transposed() && is_stored)
}

/// The biases of products, by their places in the graph.
fn biases<O: Tensors>(walk: &Walk<O>) -> HashMap<usize, ParamId> {
    let graph = walk.graph();
    let of = |product: &Product| {
        let path = bias(graph, product)?;
        let mut parameters = graph.parameters().iter();
        parameters
            .find(|parameter| parameter.path == path)
            .map(|parameter| parameter.id)
    };
    let products = walk.products();
    products
        .iter()
        .filter_map(|product| Some((product.node, of(product)?)))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn_lean_graph::UnitRole;

    #[test]
    fn zeros_can_be_left_out_and_move_into_no_bias() {
        let bias = ParamId::new();
        let axis = UnitAxis {
            path: "weight".into(),
            id: ParamId::new(),
            axis: 0,
            role: UnitRole::Reads,
            places: vec![vec![0], vec![1], vec![2]],
        };
        let of = |bias| {
            let constants = vec![Some(0.0), Some(0.5), None];
            let reader = Reader { constants, bias };
            let readers = Readers(HashMap::from([(("weight".into(), 0), reader)]));
            [0, 1, 2].map(|unit| readers.constants(&axis, unit))
        };
        let half = Some((vec![0.5], Some(bias)));
        assert_eq!(of(Some(bias)), [Some((vec![0.0], None)), half, None]);
        assert_eq!(of(None), [Some((vec![0.0], None)), None, None]);
    }
}
