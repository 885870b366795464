//! Intervals and tests of shares.

use serde::{Deserialize, Serialize};

/// A share with its confidence interval, all 0 to 1.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Share {
    /// What was counted.
    pub value: f64,
    /// Lower end of the interval.
    pub low: f64,
    /// Upper end of the interval.
    pub high: f64,
}

/// The share `count / of`, at most 1, with its interval by Wilson's score, at this confidence, above 0
/// and below 1.
///
/// ```text
/// (p + z²/2n ± z √(p(1−p)/n + z²/4n²)) / (1 + z²/n)
/// ```
///
/// [Probable Inference, the Law of Succession, and Statistical Inference, Wilson,
/// 1927](https://doi.org/10.1080/01621459.1927.10502953). Of nothing counted it is 0 to 1.
///
/// ```
/// use burn_lean_recipe::wilson;
///
/// let share = wilson(8, 10, 0.95);
/// assert!((share.low - 0.4902).abs() < 1e-4 && (share.high - 0.9433).abs() < 1e-4);
/// ```
pub fn wilson(count: usize, of: usize, confidence: f64) -> Share {
    if of == 0 {
        return Share {
            value: f64::NAN,
            low: 0.0,
            high: 1.0,
        };
    }
    let (n, p) = (of as f64, count.min(of) as f64 / of as f64);
    let z = normal_quantile(0.5 + 0.5 * confidence);
    let scale = 1.0 + z * z / n;
    let center = (p + z * z / (2.0 * n)) / scale;
    let half = z * (p * (1.0 - p) / n + z * z / (4.0 * n * n)).sqrt() / scale;
    Share {
        value: p,
        low: (center - half).clamp(0.0, p),
        high: (center + half).clamp(p, 1.0),
    }
}

/// The two-sided p-value of McNemar's exact test: `a` examples that only the first of two models has
/// right, `b` that only the second has right.
///
/// ```text
/// p = min(1, 2 · Σ_{i ≤ min(a, b)} C(a + b, i) / 2^(a + b))
/// ```
///
/// [Note on the sampling error of the difference between correlated proportions, McNemar,
/// 1947](https://doi.org/10.1007/BF02295996), with the binomial distribution itself.
///
/// ```
/// use burn_lean_recipe::mcnemar;
///
/// // 2 · (1 + 6) / 2⁶
/// assert_eq!(mcnemar(1, 5), 0.21875);
/// assert_eq!(mcnemar(0, 0), 1.0);
/// ```
pub fn mcnemar(a: usize, b: usize) -> f64 {
    let n = a + b;
    let tail = a.min(b);
    if n <= 60 {
        let mut binomial = 1u128;
        let mut sum = 0;
        for i in 0..=tail as u128 {
            sum += binomial;
            binomial = binomial * (n as u128 - i) / (i + 1);
        }
        return f64::min(1.0, 2.0 * sum as f64 / 2f64.powi(n as i32));
    }
    // ln of C(n, i) / 2ⁿ, from one i to the next.
    let mut log = -(n as f64) * std::f64::consts::LN_2;
    let mut sum = 0.0;
    for i in 0..=tail {
        sum += log.exp();
        log += ((n - i) as f64).ln() - ((i + 1) as f64).ln();
    }
    f64::min(1.0, 2.0 * sum)
}

/// Where the standard normal distribution has this share below, above 0 and below 1: bisection on
/// its distribution function.
fn normal_quantile(share: f64) -> f64 {
    let (mut low, mut high) = (-12.0, 12.0);
    for _ in 0..80 {
        let middle = 0.5 * (low + high);
        match normal_share(middle) < share {
            true => low = middle,
            false => high = middle,
        }
    }
    0.5 * (low + high)
}

/// Share of the standard normal distribution below x: the series of Abramowitz & Stegun 26.2.10, of
/// the density times x + x³/3 + x⁵/15 + …
fn normal_share(x: f64) -> f64 {
    if x.abs() > 8.0 {
        return if x > 0.0 { 1.0 } else { 0.0 };
    }
    let (mut term, mut sum) = (x, x);
    for k in 1..400 {
        term *= x * x / f64::from(2 * k + 1);
        sum += term;
    }
    let density = (-0.5 * x * x).exp() / (2.0 * std::f64::consts::PI).sqrt();
    0.5 + density * sum
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_of_the_normal_distribution_are_those_of_tables() {
        for (share, z) in [
            (0.5, 0.0),
            (0.975, 1.959_963_985),
            (0.995, 2.575_829_304),
            (0.025, -1.959_963_985),
        ] {
            assert!((normal_quantile(share) - z).abs() < 1e-8, "{share}");
        }
    }

    #[test]
    fn intervals_hold_the_share_and_stay_inside() {
        for n in [1, 2, 7, 360, 10_000] {
            for count in [0, 1, n / 2, n] {
                let share = wilson(count, n, 0.95);
                assert!(
                    0.0 <= share.low && share.low <= share.value,
                    "{count} of {n}"
                );
                assert!(
                    share.value <= share.high && share.high <= 1.0,
                    "{count} of {n}"
                );
                assert!(share.high > share.low);
            }
        }
        // More than all are all.
        assert_eq!(wilson(11, 10, 0.95), wilson(10, 10, 0.95));
        // All right: z² / (n + z²) below 1.
        let z2 = 1.959_963_985f64.powi(2);
        assert!((wilson(10, 10, 0.95).low - 10.0 / (10.0 + z2)).abs() < 1e-9);
    }

    /// Sums of binomials by hand.
    #[test]
    fn the_exact_test_sums_the_tails() {
        assert_eq!(mcnemar(3, 3), 1.0);
        assert_eq!(mcnemar(0, 5), 2.0 / 32.0);
        assert_eq!(mcnemar(5, 0), 2.0 / 32.0);
        // (1 + 10 + 45) / 512
        assert_eq!(mcnemar(2, 8), 56.0 / 512.0);
        // Normal approximation with continuity: z = (|60 − 140| − 1) / √200.
        assert!(mcnemar(60, 140) < 1e-7 && mcnemar(60, 140) > 1e-9);
        assert!((mcnemar(2000, 2000) - 1.0).abs() < 1e-12);
    }
}
