//! The search against all supports of small problems.

use burn::tensor::Device;
use burn_lean::prune::{Budget, ChitaConfig, Method, SolverConfig, solve};

use crate::reference::Plain;

/// 400 problems of 4 to 13 weights. How often each search finds the optimum, and its worst gap.
#[test]
fn the_search_finds_the_best_of_all_supports_in_nearly_every_small_problem() {
    let device = Device::flex();
    let without_splices = ChitaConfig::new().with_max_splices(0);
    let methods = [
        ("back-solve", Method::BackSolve, 0.50, 100.0),
        (
            "without splices",
            Method::Chita(without_splices),
            0.5,
            100.0,
        ),
        ("stages", Method::Chita(ChitaConfig::new()), 0.9, 15.0),
    ];
    let mut found = [0; 3];
    let mut worst = [0.0f64; 3];
    let problems = 400;
    for seed in 0..problems {
        let p = 4 + (seed % 10) as usize;
        let n = 3 + (seed % 17) as usize;
        let k = 1 + (seed as usize * 7) % (p - 1);
        let plain = Plain {
            ridge: [1e-3, 1e-2, 0.1, 1.0][(seed % 4) as usize],
            first_order: if seed % 5 == 0 { 0.1 } else { 0.0 },
            ..Plain::random(seed, n, p)
        };
        let (best, support) = plain.brute_force(k);
        // Objectives with a first-order term have no natural zero; gaps are measured from the
        // minimum without any constraint.
        let all: Vec<usize> = (0..p).collect();
        let floor = plain.objective(&plain.back_solve(&all));
        let problem = plain.problem(&device);
        for (at, (name, method, ..)) in methods.iter().enumerate() {
            let config = SolverConfig::new(Budget::Keep(k)).with_method(method.clone());
            let solution = solve(&problem, &config).unwrap();
            assert_eq!(solution.support.len(), k);
            let own = plain.objective(&plain.back_solve(&solution.support));
            let gap = (own - best) / (best - floor).max(1e-9);
            assert!(
                gap > -1e-9,
                "{name}, seed {seed}: better than the best of all supports"
            );
            found[at] += usize::from(solution.support == support || gap < 1e-6);
            worst[at] = worst[at].max(gap);
        }
    }
    for (at, (name, _, least, most)) in methods.iter().enumerate() {
        let share = found[at] as f64 / problems as f64;
        println!(
            "{name}: optimum in {:.2} %, worst gap {:.2} %",
            100.0 * share,
            100.0 * worst[at]
        );
        assert!(
            share >= *least,
            "{name} finds the optimum in {share} of the problems"
        );
        assert!(worst[at] <= *most, "{name} misses by {}", worst[at]);
    }
    assert!(found[2] > found[1], "{found:?}");
}

/// Splicing looks at all pairs of so few weights: every exchange is solved in F64; for fewer and for
/// more samples than weights.
#[test]
fn where_splicing_ends_no_single_exchange_improves() {
    let device = Device::flex();
    for seed in 0..60 {
        let (n, p) = if seed < 30 { (12, 24) } else { (200, 24) };
        let plain = Plain::random(1000 + seed, n, p);
        let config = SolverConfig::new(Budget::Keep(8));
        let solution = solve(&plain.problem(&device), &config).unwrap();
        let own = plain.objective(&plain.back_solve(&solution.support));
        for leaves in &solution.support {
            for enters in (0..plain.p()).filter(|index| !solution.support.contains(index)) {
                let mut other = solution.support.clone();
                other.retain(|index| index != leaves);
                other.push(enters);
                let objective = plain.objective(&plain.back_solve(&other));
                // The search stops below improvements of 1e-6 of the objective.
                assert!(
                    objective >= own * (1.0 - 2e-6),
                    "seed {seed}: {leaves} for {enters}"
                );
            }
        }
    }
}
