//! The step length of iterative hard thresholding.
//!
//! Along −g the objective of the *projected* point w(t) = P(w − t g) is piecewise quadratic: a new
//! piece begins where the support changes. Within the first piece the minimum is known,
//!
//! ```text
//! t* = ‖g_S‖² / (‖G g_S‖² + 2λ‖g_S‖²)
//! ```
//!
//! and so is the piece's end t_c, the step at which the first pruned weight overtakes a kept one.
//! Where t* < t_c the step is t*. Beyond t_c the support changes, and t is doubled for as long as
//! the objective falls.

/// The exact minimum of the objective along the gradient on a fixed support; `None` where the
/// gradient is zero there.
///
/// `gradient` is the gradient on the support and `curvature` is ‖G g_S‖².
pub(crate) fn optimal_step(gradient: &[f32], curvature: f64, lambda: f64) -> Option<f64> {
    let norm: f64 = gradient.iter().map(|g| f64::from(*g).powi(2)).sum();
    let step = norm / (curvature + 2.0 * lambda * norm);
    (norm > 0.0 && step.is_finite()).then_some(step)
}

/// The largest step that leaves the support as it is: until then every kept weight stays larger
/// than every pruned one. Infinite where that never ends.
///
/// `weights` and `gradient` are given over the same indices; pruned weights are zero in `kept`.
pub(crate) fn change_step(weights: &[f32], gradient: &[f32], kept: &[bool]) -> f64 {
    let all = || weights.iter().zip(gradient).zip(kept);
    // Pruned weights grow as t·|g|; the fastest one is first.
    let fastest = all()
        .filter(|(_, kept)| !**kept)
        .map(|((_, gradient), _)| f64::from(gradient.abs()))
        .fold(0.0, f64::max);
    all()
        .filter(|(_, kept)| **kept)
        .map(|((weight, gradient), _)| {
            let (size, slope) = (f64::from(weight.abs()), f64::from(gradient.abs()));
            // A step along −g shrinks a weight of the sign of g.
            let shrinks = (*weight >= 0.0) == (*gradient >= 0.0);
            match (shrinks, fastest > slope) {
                (true, _) if slope + fastest > 0.0 => size / (slope + fastest),
                (false, true) => size / (fastest - slope),
                _ => f64::INFINITY,
            }
        })
        .fold(f64::INFINITY, f64::min)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_optimal_step_minimises_a_parabola() {
        // f(t) = −‖g‖² t + ½ (curvature + 2λ‖g‖²) t², ‖g‖² = 25.
        assert_eq!(optimal_step(&[3.0, 4.0], 50.0, 0.5), Some(25.0 / 75.0));
        assert_eq!(optimal_step(&[0.0, 0.0], 0.0, 0.5), None);
    }

    #[test]
    fn the_change_step_is_where_a_pruned_weight_overtakes() {
        // |2 − t| = 3t at t = ½.
        assert_eq!(change_step(&[2.0, 0.0], &[1.0, 3.0], &[true, false]), 0.5);
        // 2 + t = 3t at t = 1.
        assert_eq!(change_step(&[2.0, 0.0], &[-1.0, 3.0], &[true, false]), 1.0);
        // The kept weight grows faster.
        let never = change_step(&[2.0, 0.0], &[-4.0, 3.0], &[true, false]);
        assert_eq!(never, f64::INFINITY);
    }

    #[test]
    fn without_pruned_weights_the_support_changes_where_a_weight_vanishes() {
        assert_eq!(change_step(&[2.0], &[1.0], &[true]), 2.0);
        assert_eq!(change_step(&[2.0], &[0.0], &[true]), f64::INFINITY);
    }
}
