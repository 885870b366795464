//! Draws figures of `RESULTS.md` from its own tables, so that both say the same.
//!
//! ```sh
//! cargo bench --profile dev --bench plots   # benches/plots/*.svg
//! ```

#[path = "../examples/support/mod.rs"]
mod support;

use std::error::Error;
use std::path::Path;

use support::{Axes, Bar, Curve, Values, write_bars, write_svg_over};

fn main() -> Result<(), Box<dyn Error>> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("benches");
    let results = std::fs::read_to_string(folder.join("RESULTS.md"))?;
    let plots = folder.join("plots");
    std::fs::create_dir_all(&plots)?;

    let resnet20 = Table::below(&results, "| ResNet20, sparsity |")?;
    let dense = resnet20.heading.iter().map(|_| "91.25".to_string());
    let curves = [
        curve("dense", dense.skip(1).collect()),
        curve("Pruner, as it is", resnet20.row("default, mean")?),
        curve("magnitude", resnet20.row("magnitude")?),
    ];
    let axes = Axes {
        step: "sparsity",
        steps: &resnet20.heading[1..],
        joined: true,
        value: "accuracy [%]",
        values: Values::Percent,
    };
    let title = "ResNet20 on CIFAR-10, BatchNorm measured anew, no training";
    write_svg_over(&plots.join("resnet20.svg"), title, axes, &curves)?;

    let llama = Table::below(&results, "| options | published | here |")?;
    let sparsities = ["0.3", "0.5", "2:4"];
    let of = |name: &str, method: &str| {
        let rows = sparsities.iter().map(|sparsity| {
            let options = format!("`--method {method} --sparsity {sparsity}`");
            llama.row(&options).map(|cells| cells[1].clone())
        });
        Ok::<_, Box<dyn Error>>(curve(name, rows.collect::<Result<_, _>>()?))
    };
    let curves = [
        of("best subsets", "best-subset")?,
        of("SparseGPT", "sparsegpt")?,
        of("Wanda", "wanda")?,
        of("magnitude", "magnitude")?,
    ];
    let axes = Axes {
        step: "zeros",
        steps: &sparsities.map(str::to_string),
        joined: false,
        value: "perplexity, FP32 3.735",
        values: Values::Positive,
    };
    let title = "A Llama of 260,000 weights, no training";
    write_svg_over(&plots.join("llama.svg"), title, axes, &curves)?;

    // The table of one thread on a CPU with VNNI.
    let since = results.find("`--samples 9 --steps 3 --threads 1`");
    let vnni = &results[since.ok_or("the table of one thread is not there")?..];
    let engine = Table::below(vnni, "| model, batch |")?;
    let column = engine.heading.iter().position(|name| name == "W8A8");
    let column = column.ok_or("no column W8A8")?;
    let bars = engine.rows.iter().map(|row| {
        let label = row[column].clone();
        let value = number(&label)?;
        let name = row[0].clone();
        Some(Bar { name, value, label })
    });
    let bars: Vec<_> = bars.collect::<Option<_>>().ok_or("not a number")?;
    let title = "W8A8 in the engine, times as fast as FP32 in Burn: one thread, AVX-512 with VNNI";
    write_bars(&plots.join("engine.svg"), title, &bars)?;
    Ok(())
}

/// A table of the file.
struct Table {
    heading: Vec<String>,
    rows: Vec<Vec<String>>,
}

impl Table {
    /// The first one whose heading begins so.
    fn below(text: &str, heading: &str) -> Result<Self, Box<dyn Error>> {
        let mut lines = text.lines().skip_while(|line| !line.starts_with(heading));
        let first = lines
            .next()
            .ok_or_else(|| format!("no table `{heading}`"))?;
        let rows = lines.skip(1).take_while(|line| line.starts_with('|'));
        Ok(Self {
            heading: cells(first),
            rows: rows.map(cells).collect(),
        })
    }

    /// The cells of the row whose name begins so, without it.
    fn row(&self, name: &str) -> Result<Vec<String>, Box<dyn Error>> {
        let found = self.rows.iter().find(|row| row[0].starts_with(name));
        let row = found.ok_or_else(|| format!("no row `{name}`"))?;
        Ok(row[1..].to_vec())
    }
}

fn cells(line: &str) -> Vec<String> {
    let inside = line.strip_prefix('|').unwrap_or(line);
    let inside = inside.strip_suffix('|').unwrap_or(inside);
    let cells = inside.split('|');
    cells.map(|cell| cell.trim().to_string()).collect()
}

/// The number that a cell begins with.
fn number(cell: &str) -> Option<f64> {
    let digits = |c: char| c.is_ascii_digit() || c == '.';
    let cell = cell.trim_start_matches('*');
    cell.split(|c| !digits(c)).next()?.parse().ok()
}

/// Values by the places of their cells.
fn curve(name: &str, cells: Vec<String>) -> Curve {
    let points = cells.iter().enumerate();
    let points = points.filter_map(|(place, cell)| Some((place, number(cell)?)));
    Curve {
        name: name.to_string(),
        points: points.collect(),
    }
}
