//! Progress on standard error.

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressFinish, ProgressStyle};

/// A bar over so many steps where it is `shown` and standard error is a terminal; gone when it is dropped.
pub(crate) fn bar(name: &'static str, steps: usize, shown: bool) -> ProgressBar {
    let target = match shown {
        true => ProgressDrawTarget::stderr(),
        false => ProgressDrawTarget::hidden(),
    };
    let style = ProgressStyle::with_template("{prefix:>22} {wide_bar} {pos}/{len} {eta}")
        .unwrap_or_else(|_| ProgressStyle::default_bar());
    ProgressBar::with_draw_target(Some(steps as u64), target)
        .with_style(style)
        .with_prefix(name)
        .with_finish(ProgressFinish::AndClear)
}
