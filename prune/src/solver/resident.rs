//! Columns of the gradient matrix at hand, for supports that change.

use burn::tensor::Tensor;

use crate::host::select;

/// Columns up to which a part of them is joined with the next one.
const SMALL_PART: usize = 512;

/// Columns of G that stay where they are while weights leave the support and come back.
#[derive(Debug, Clone)]
pub(crate) struct Resident {
    /// Consecutive columns.
    pub(crate) parts: Vec<Tensor<2>>,
    /// The weights that they belong to, ascending, and the position of each.
    pub(crate) weights: Vec<usize>,
    positions: Vec<usize>,
}

impl Resident {
    /// Columns of these weights (ascending), in their order.
    pub(crate) fn new(weights: &[usize], parts: Vec<Tensor<2>>) -> Self {
        Self {
            parts,
            weights: weights.to_vec(),
            positions: (0..weights.len()).collect(),
        }
    }

    /// Adds columns of weights (ascending) that it does not have.
    pub(crate) fn extend(&mut self, weights: &[usize], parts: Vec<Tensor<2>>) {
        for part in parts {
            match self.parts.pop() {
                // Few at a time would become many small products.
                Some(last) if last.dims()[1] + part.dims()[1] <= SMALL_PART => {
                    self.parts.push(Tensor::cat(vec![last, part], 1));
                }
                last => self.parts.extend(last.into_iter().chain([part])),
            }
        }
        let first = self.weights.len();
        let own = self
            .weights
            .iter()
            .copied()
            .zip(self.positions.iter().copied());
        let mut all: Vec<(usize, usize)> =
            own.chain(weights.iter().copied().zip(first..)).collect();
        all.sort_unstable();
        (self.weights, self.positions) = all.into_iter().unzip();
    }

    /// Which of these weights (ascending) have no column here.
    pub(crate) fn missing(&self, weights: &[usize]) -> Vec<usize> {
        let is_missing = |index: &usize| self.weights.binary_search(index).is_err();
        weights.iter().copied().filter(is_missing).collect()
    }

    /// Where the columns of these weights are, in their order; all of them are here.
    pub(crate) fn positions_of(&self, weights: &[usize]) -> Vec<usize> {
        let mut at = 0;
        let position = |index: &usize| {
            at += self.weights[at..].partition_point(|other| other < index);
            self.positions[at]
        };
        weights.iter().map(position).collect()
    }

    /// The columns of these weights a part at a time, and the weights in the order of the columns.
    pub(crate) fn columns_of(&self, weights: &[usize]) -> (Vec<usize>, Vec<usize>) {
        let positions = self.positions_of(weights).into_iter();
        let mut pairs: Vec<(usize, usize)> = positions.zip(weights.iter().copied()).collect();
        pairs.sort_unstable();
        pairs.into_iter().unzip()
    }

    /// The columns at these positions (ascending), a part at a time.
    pub(crate) fn columns<'a>(
        &'a self,
        positions: &'a [usize],
    ) -> impl Iterator<Item = Tensor<2>> + 'a {
        let mut end = 0;
        self.parts.iter().filter_map(move |part| {
            let first = end;
            end += part.dims()[1];
            let from = positions.partition_point(|position| *position < first);
            let to = positions.partition_point(|position| *position < end);
            let local = positions[from..to].iter().map(move |at| at - first);
            (from < to).then(|| select(part.clone(), 1, local))
        })
    }
}
