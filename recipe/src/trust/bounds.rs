//! Which bounds a report breaks.

use super::Trust;
use crate::{Bounds, BrokenBound};

impl Bounds {
    /// The bounds that a report breaks.
    pub fn broken(&self, trust: &Trust) -> Vec<BrokenBound> {
        let (original, compressed) = (trust.original.accuracy, trust.compressed.accuracy);
        // By counts: 29 of 100 are 29 %, but 100 · 0.29 is a little less.
        let examples = trust.examples as f64;
        let count = |share: f64| (share * examples).round();
        let percent = |counted: f64| 100.0 * counted / examples;
        let lost = |before: f64, after: f64| count(before) - count(after);
        let robustness = trust.robustness.iter().map(|under| {
            let more = lost(compressed.value, under.compressed);
            percent(more - lost(original.value, under.original))
        });
        let at_most = [
            (
                "max_accuracy_drop",
                self.max_accuracy_drop,
                percent(lost(original.value, compressed.value)),
            ),
            (
                "max_disagreement",
                self.max_disagreement,
                percent(count(trust.disagreement.value)),
            ),
            ("max_ece", self.max_ece, trust.compressed.ece),
            (
                "max_bytes",
                self.max_bytes.map(|bytes| bytes as f64),
                trust.compressed.bytes as f64,
            ),
            (
                "max_latency_ms",
                self.max_latency_ms,
                trust.compressed.latency_ms.unwrap_or(f64::NAN),
            ),
            (
                "max_robustness_drop",
                self.max_robustness_drop,
                robustness.reduce(f64::max).unwrap_or(f64::NAN),
            ),
        ];
        let at_most = at_most
            .into_iter()
            .map(|(bound, limit, found)| (bound, limit, found, 1.0));
        let at_least = [(
            "min_accuracy",
            self.min_accuracy,
            percent(count(compressed.value)),
            -1.0,
        )];
        at_most
            .chain(at_least)
            .filter_map(|(bound, limit, found, sign)| {
                let limit = limit?;
                let kept = sign * found <= sign * limit;
                (!kept).then(|| BrokenBound {
                    bound: bound.into(),
                    limit,
                    found: (!found.is_nan()).then_some(found),
                })
            })
            .collect()
    }
}
