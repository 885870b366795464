//! Horizontal bars, as SVG.

use std::path::Path;

use plotters::prelude::*;

/// One bar of a figure.
#[derive(Debug, Clone)]
pub(crate) struct Bar {
    pub(crate) name: String,
    pub(crate) value: f64,
    /// What stands beside it.
    pub(crate) label: String,
}

/// Width, the height of a bar with its gap, and where bars begin.
const WIDTH: u32 = 860;
const ROW: i32 = 44;
const LEFT: i32 = 190;
/// Width of the longest bar.
const LONGEST: f64 = 460.0;

/// Draws the bars below each other, the longest over the whole width.
pub(crate) fn write_bars(path: &Path, title: &str, bars: &[Bar]) -> Result<(), String> {
    let failed =
        |error: &dyn std::fmt::Display| format!("cannot write {}: {error}", path.display());
    let height = 60 + ROW as u32 * bars.len() as u32;
    let root = SVGBackend::new(path, (WIDTH, height)).into_drawing_area();
    root.fill(&WHITE).map_err(|error| failed(&error))?;
    let font = ("sans-serif", 15);
    let heading = Text::new(title, (12, 14), ("sans-serif", 18));
    root.draw(&heading).map_err(|error| failed(&error))?;
    let most = bars
        .iter()
        .map(|bar| bar.value)
        .fold(f64::MIN_POSITIVE, f64::max);
    for (index, bar) in bars.iter().enumerate() {
        let top = 48 + ROW * index as i32;
        let right = LEFT + (LONGEST * bar.value / most).round() as i32;
        let corners = [(LEFT, top), (right.max(LEFT + 1), top + 26)];
        let fill = Rectangle::new(corners, super::curve::COLORS[0].filled());
        root.draw(&fill).map_err(|error| failed(&error))?;
        for (text, x) in [(&bar.name, 12), (&bar.label, right + 8)] {
            root.draw(&Text::new(text.clone(), (x, top + 6), font))
                .map_err(|error| failed(&error))?;
        }
    }
    root.present().map_err(|error| failed(&error))
}
