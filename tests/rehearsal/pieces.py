"""In place of `pallas_kernels.testing.pieces`: on the backend's own kernels, or on a wrong one."""

import os
import sys

from tests.rehearsal import faults

if __name__ == "__main__":
    if name := os.environ.get("FAULT"):
        faults.plant(faults.FAULTS[name])
    backend = os.environ["REHEARSED"]

    from pallas_kernels.testing import checks, pieces
    from tests.rehearsal import stand_ins

    with stand_ins.in_place(backend) as seen:

        def run_piece(piece: pieces.Piece):
            def run():
                piece.run()
                assert seen(), "no kernel was executed"

            return piece._replace(run=run)

        run_pieces = pieces.check_pieces
        pieces.check_pieces = lambda every, tell: run_pieces(map(run_piece, every), tell)
        sys.exit(pieces.main(kernels=checks.by_name(backend)))
