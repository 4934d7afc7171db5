"""Small .xlsx and .ods files, written as XML, .xlsb files, and an .xls file."""

import struct
import zipfile
import zlib
from base64 import b64decode
from datetime import date, datetime
from xml.sax.saxutils import escape

_MAIN = "http://schemas.openxmlformats.org/spreadsheetml/2006/main"
_PACKAGE = "http://schemas.openxmlformats.org/package/2006"
_OFFICE = "http://schemas.openxmlformats.org/officeDocument/2006/relationships"
_ODS = "urn:oasis:names:tc:opendocument:xmlns:{0}:1.0"


class Raw(str):
    """XML of a cell, without its place."""


def _cell(value, place):
    if isinstance(value, Raw):
        return value.replace("<c", f'<c r="{place}"', 1)
    if isinstance(value, bool):
        return f'<c r="{place}" t="b"><v>{value:d}</v></c>'
    if isinstance(value, date):
        days = (datetime.combine(value, datetime.min.time()) - datetime(1899, 12, 30)).days
        return f'<c r="{place}" s="1"><v>{days}</v></c>'
    if isinstance(value, str):
        return f'<c r="{place}" t="inlineStr"><is><t>{escape(value)}</t></is></c>'
    return "" if value is None else f'<c r="{place}"><v>{value!r}</v></c>'


def _letters(j):
    return chr(65 + j) if j < 26 else _letters(j // 26 - 1) + _letters(j % 26)


def _sheet(rows, more):
    lines = (
        f'<row r="{i}">{"".join(_cell(value, f"{_letters(j)}{i}") for j, value in enumerate(row))}</row>'
        for i, row in enumerate(rows, 1)
    )
    return f'<worksheet xmlns="{_MAIN}"><sheetData>{"".join(lines)}</sheetData>{more}</worksheet>'


def write_xlsx(path, sheets, *, hidden=(), more="", change=lambda name, content: content):
    """Write a workbook.

    Args:
        path: of the file, which is returned.
        sheets: rows of each sheet, by its name.
        hidden: names of sheets.
        more: XML after the rows of the first sheet.
        change: a function of the name and the content of a part that returns its content.
    """
    states = "visible", "hidden"
    names = "".join(
        f'<sheet name="{escape(name)}" sheetId="{i}" r:id="r{i}" state="{states[name in hidden]}"/>'
        for i, name in enumerate(sheets, 1)
    )
    links = "".join(
        f'<Relationship Id="r{i}" Type="{_OFFICE}/worksheet" Target="worksheets/sheet{i}.xml"/>'
        for i in range(1, len(sheets) + 1)
    )
    links += f'<Relationship Id="s" Type="{_OFFICE}/styles" Target="styles.xml"/>'
    parts = {
        "[Content_Types].xml": f'<Types xmlns="{_PACKAGE}/content-types"/>',
        "_rels/.rels": f'<Relationships xmlns="{_PACKAGE}/relationships"><Relationship Id="w" '
        f'Type="{_OFFICE}/officeDocument" Target="xl/workbook.xml"/></Relationships>',
        "xl/workbook.xml": f'<workbook xmlns="{_MAIN}" xmlns:r="{_OFFICE}"><sheets>{names}</sheets></workbook>',
        "xl/_rels/workbook.xml.rels": f'<Relationships xmlns="{_PACKAGE}/relationships">{links}</Relationships>',
        "xl/styles.xml": f'<styleSheet xmlns="{_MAIN}"><cellXfs><xf/><xf numFmtId="14"/></cellXfs></styleSheet>',
    }
    for i, rows in enumerate(sheets.values(), 1):
        parts[f"xl/worksheets/sheet{i}.xml"] = _sheet(rows, more if i == 1 else "")
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in parts.items():
            archive.writestr(name, change(name, content))
    return path


def write_ods(path, rows, repeated=1):
    """Write an OpenDocument sheet of numbers and texts, whose last row is repeated; its path."""
    office, table, text = (_ODS.format(name) for name in ("office", "table", "text"))
    cells = [
        "".join(
            f'<table:table-cell office:value-type="float" office:value="{value}"/>'
            if isinstance(value, int | float)
            else f'<table:table-cell office:value-type="string"><text:p>{escape(value)}</text:p></table:table-cell>'
            for value in row
        )
        for row in rows
    ]
    lines = [f"<table:table-row>{row}</table:table-row>" for row in cells[:-1]]
    lines += [f'<table:table-row table:number-rows-repeated="{repeated}">{cells[-1]}</table:table-row>']
    body = f'<table:table table:name="Sheet">{"".join(lines)}</table:table>'
    names = f'xmlns:office="{office}" xmlns:table="{table}" xmlns:text="{text}"'
    manifest = f'<manifest xmlns="{_ODS.format("manifest")}"/>'
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("mimetype", "application/vnd.oasis.opendocument.spreadsheet")
        archive.writestr("META-INF/manifest.xml", manifest)
        body = f"<office:body><office:spreadsheet>{body}</office:spreadsheet></office:body>"
        archive.writestr("content.xml", f"<office:document-content {names}>{body}</office:document-content>")
    return path


def _record(kind, content=b""):
    """A record of an .xlsb file: type and size, 7 bits a byte, and content."""
    return b"".join(bytes([n & 127 | 128, n >> 7] if n > 127 else [n]) for n in (kind, len(content))) + content


def _wide(text):
    return struct.pack("<I", len(text)) + text.encode("utf-16-le")


def write_xlsb(path, rows):
    """Write a sheet of numbers and texts as [MS-XLSB] has it; its path."""
    sheets = _record(0x9C, struct.pack("<II", 0, 1) + _wide("r1") + _wide("Sheet"))
    book = _record(0x83) + _record(0x99, bytes(12)) + _record(0x8F) + sheets + _record(0x90)
    book += _record(0x9D, bytes(26)) + _record(0x84)
    cells = b""
    for i, row in enumerate(rows):
        cells += _record(0, struct.pack("<I", i) + bytes(21))
        for j, value in enumerate(row):
            is_text = isinstance(value, str)
            content = _wide(value) if is_text else struct.pack("<d", value)
            cells += _record(6 if is_text else 5, struct.pack("<II", j, 0) + content)
    size = struct.pack("<4I", 0, len(rows) - 1, 0, len(rows[0]) - 1)
    sheet = _record(0x81) + _record(0x94, size) + _record(0x91) + cells + _record(0x92) + _record(0x82)
    link = f'<Relationship Id="r1" Type="{_OFFICE}/worksheet" Target="worksheets/sheet1.bin"/>'
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(
            "xl/_rels/workbook.bin.rels", f'<Relationships xmlns="{_PACKAGE}/relationships">{link}</Relationships>'
        )
        archive.writestr("xl/workbook.bin", book)
        archive.writestr("xl/worksheets/sheet1.bin", sheet)
    return path


#: An .xls file by xlwt 1.3.0: age, sex, outcome; 70, m, yes; 45.5, f, no.
XLS = zlib.decompress(
    b64decode(
        "eNrtWE1oE0EU/maTND+06aamQlMooWDV2ot48dKuFTQnS/WiiKBpu4q0zUpawXrQas1REDwpXgq9eKl68Qc96M2DUH8OgiAkevQkKPTQZn3v7W5N"
        "aw8NaFGZb5k3b97MtzOZ9+Zld18vpMqzDzIVrEEfQqi6cTTU2BSVeNAwQf2uy2pQx6i4Gv8U4jFyZEMET5teRdmH7O8KDNwPvyAJfKJyAucw4BTs"
        "7CZiv6whr3gNvSQV7pAliTZZVYvIYZFbRN6Tkc9E7hPLdZG9NLasjmPBGuje60fxMaNT+pLg+z4Szgex7EYrXnIUX76hvLER9BfP5sf+zo6OcCPm"
        "QH7L2QW7mB8rI00OnMN3Nwt8C07q86y2b65dgeyLq+3Rdew3jTAwDfeUBHiJkuubkOfg/iWKRT6QXMiWP2OTnLAvUNs5PznsjNsUCuNkm7InSDtN"
        "0VtwEpyg5UCbqw50kwR6I8kRNIueknA3KWUv3f369tDQoHVSLNOSxL1Uv41XBxdXmEHkpPSEVmS3MHaJvCp3bRc9IzJNQUp112CrrxyckTHXpLeL"
        "5tkjeGdtr9F3kF76cvhxR+mztZP0+VzlYnr+vTWLTtqdEeLzNYMe1aNu32I8sYJa+Wnho8i2X1JEzDD9tbv+/1kzlpEQNSXSa/HuqJWW4e8Vs9Ua"
        "9iUjIbYUMsobr4QdQtBidthnG+uwDWG357zxnmciCFrMZv/1GS14yEMptf1EAhoaGhoaGhoaGhp1QskjrvdAzw+qEf+VIep/11mmUtWfSf5bHIFD"
        "1yS9mB5AgeoipuqKn62IqOBeaoOc4Hsh4yjNXsQohmQdo3XHL73yqdrfs2Gi+fuOUL3zV+tZ5x+e/wcIT8kX"
    )
)
