//! From a class for each step to symbols, and how many of them are wrong.

use burn::tensor::Tensor;

use crate::batches::BLANK;

/// What a sequence of classes says: repeats become one, then the blanks go.
///
/// In that order, so that a blank between two equal symbols keeps them apart.
pub(crate) fn collapse(classes: &[usize]) -> Vec<usize> {
    let mut classes = classes.to_vec();
    classes.dedup();
    classes.retain(|class| *class != BLANK);
    classes.iter().map(|class| class - 1).collect()
}

/// The symbols of the likeliest class of each step, for logits `[batch, steps, classes]`.
///
/// The likeliest alignment, not the likeliest symbols, which are a sum over alignments.
pub(crate) fn greedy(logits: Tensor<3>) -> Vec<Vec<usize>> {
    let [_, steps, _] = logits.dims();
    let classes = logits.argmax(2).into_data();
    let classes: Vec<usize> = classes.iter::<i64>().map(|class| class as usize).collect();
    classes.chunks(steps.max(1)).map(collapse).collect()
}

/// The least number of insertions, deletions and replacements that make one of the other
/// (Levenshtein 1966).
pub(crate) fn edit_distance(reference: &[usize], hypothesis: &[usize]) -> usize {
    // Distances from the first symbols of the reference to all beginnings of the hypothesis.
    let mut row: Vec<usize> = (0..=hypothesis.len()).collect();
    for (deleted, symbol) in reference.iter().enumerate() {
        let mut diagonal = std::mem::replace(&mut row[0], deleted + 1);
        for (at, other) in hypothesis.iter().enumerate() {
            let replaced = diagonal + usize::from(symbol != other);
            diagonal = row[at + 1];
            row[at + 1] = replaced.min(row[at] + 1).min(diagonal + 1);
        }
    }
    row[hypothesis.len()]
}

/// Edits over all utterances.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct CharacterErrors {
    pub(crate) edits: usize,
    /// Symbols of the references.
    pub(crate) symbols: usize,
}

impl CharacterErrors {
    pub(crate) fn add(&mut self, reference: &[usize], hypothesis: &[usize]) {
        self.edits += edit_distance(reference, hypothesis);
        self.symbols += reference.len();
    }

    /// The character error rate [%]; above 100 where more is inserted than there is.
    pub(crate) fn rate(&self) -> f64 {
        100.0 * self.edits as f64 / self.symbols.max(1) as f64
    }
}
