//! Prints the folder of the emulated driver, for programs that find it by `LD_LIBRARY_PATH`.

use std::process::ExitCode;

fn main() -> ExitCode {
    match wakekv_emulator::folder() {
        Ok(folder) => {
            println!("{}", folder.display());
            ExitCode::SUCCESS
        }
        Err(missing) => {
            eprintln!("error: {missing}");
            ExitCode::FAILURE
        }
    }
}
